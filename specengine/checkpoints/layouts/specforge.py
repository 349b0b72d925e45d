"""The layout of SpecForge and AngelSlim: that of the EAGLE repository, and fields of their own."""

from specengine.checkpoints.layouts.eagle import EagleLayout


class SpecForge(EagleLayout):
    """EAGLE-3. An `eagle_config` counts layers by their outputs."""

    marks = ("eagle_config",)
    architectures = ("LlamaForCausalLMEagle3",)

    def read_norm_output(self) -> bool:
        """Read whether logits are read after the final norm. Speculators means another thing by this field."""
        return self.fields.flag("norm_output")
