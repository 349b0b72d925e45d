"""The forward on a CPU compared with alternatives and with the goals.

Every part measures its methods in turn and returns medians. A method that cannot run here is recorded as skipped, with
the reason. Records are written as they are measured, so an interrupted run keeps them.

    forward   a forward behind 200 tokens by rows of the tree, over the time to read the same weights once
    plain     decoding without a draft: transformers' `generate`, this engine, llama.cpp
    default   the default draft and policy over `generate`, prompt lookup and llama.cpp's plain decoding, by prompt set
    memory    peak resident memory of loading a way and answering, beyond imports and tokenizer
    isa       the native forward held to one instruction set, against the Hugging Face path
    start     seconds from the start of a process to the first token of the default model, with empty and full cache

    python -m bench.cpu --out FILE --prompts FOLDER             everything, and the goals beside it
    python -m bench.cpu --part forward --way huggingface        one part, one way
"""
