// Attention whose sums do not depend on the rows beside.
#include "ops/ops.hpp"
#include "spec/strict_attention.hpp"

namespace ops {
namespace {

// Rows of keys or values, dense in their channels; others are copied, and `copy` holds them.
border::Tensor take_cache(handle object, const char* name, border::Dtype dtype, int64_t size, py::object& copy) {
  border::Tensor out;
  bool known = border::read(object, out);
  if (known && out.rank == 3 && !out.is_dense(2)) {
    copy = object.attr("contiguous")();
    known = border::read(copy, out);
  }
  if (!known || !(out.dtype == dtype) || !border::is_real(out) || !out.fits({at_least(1), kAny, size}) || !out.is_dense(2))
    border::refuse(name, border::described(object),
                   "the dtype of query, " + border::shown({at_least(1), kAny, size}) + ", on the CPU");
  return out;
}

void require_paths(const border::Input<int32_t>& places, const border::Input<int32_t>& seen, int64_t rows,
                   int64_t slots) {
  const int64_t columns = places.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    require(seen[row] >= 0 && seen[row] <= columns, "counts", seen[row], "0 to " + std::to_string(columns));
    const int32_t* path = places.at() + row * columns;
    require_below(path, seen[row], slots, "nodes");
    for (int64_t i = 1; i < seen[row]; ++i) require(path[i] > path[i - 1], "nodes", path[i], "ascending ones");
  }
}

template <typename T>
py::object attend(handle query, handle key, handle value, handle paths, handle prefix, handle live, float scale) {
  using Bits = std::conditional_t<std::is_same_v<T, border::bfloat16>, uint16_t, float>;
  const auto asked = take_input<T>(query, "query", {kAny, kAny, kAny});
  const int64_t heads = asked.size(0), rows = asked.size(1), size = asked.size(2);
  py::object copies[2];
  const border::Tensor keys = take_cache(key, "key", border::DtypeOf<T>::dtype, size, copies[0]);
  const border::Tensor values = take_cache(value, "value", border::DtypeOf<T>::dtype, size, copies[1]);
  const int64_t kv_heads = keys.size(0), capacity = keys.size(1);
  if (values.size(0) != kv_heads || values.size(1) != capacity)
    border::refuse("value", border::described(value), "the sizes of key");
  require(heads % kv_heads == 0, "query", heads, "heads: a multiple of " + std::to_string(kv_heads));
  const Parts parts(paths, "paths", 2);
  const auto places = take_input<int32_t>(parts[0], "nodes", {rows, kAny});
  const auto seen = take_input<int32_t>(parts[1], "counts", {rows});
  const int64_t before = take_one<int32_t>(prefix, "prefix"), alive = take_one<int32_t>(live, "live");
  require(before >= 0 && before <= capacity, "prefix", before, "0 to " + std::to_string(capacity));
  require_paths(places, seen, std::min(rows, alive), capacity - before);
  const auto out = make<T>({heads, rows, size});
  const spec::AttentionShape sizes{kv_heads, heads / kv_heads, rows, size, keys.strides[0], keys.strides[1],
                                   values.strides[0], values.strides[1], scale};
  const spec::RowPaths ways{places.size(1), before, alive, places.at(), seen.at()};
  {
    py::gil_scoped_release release;
    spec::strict_attention(sizes, static_cast<const Bits*>(asked.data), static_cast<const Bits*>(keys.data),
                           static_cast<const Bits*>(values.data), ways, static_cast<Bits*>(out.data));
  }
  return out.object;
}

py::object in_float32(handle object, const char* name) {
  border::Tensor given;
  if (!border::read(object, given)) border::refuse(name, border::described(object), "the dtype of query, on the CPU");
  return object.attr("float")();
}

py::object strict_cached_attention(handle query, handle key, handle value, handle paths, handle prefix, handle live,
                                   float scale) {
  border::Tensor asked;
  const bool known = border::read(query, asked);
  if (known && asked.dtype == border::Dtype{border::kFloat, 16}) {
    const py::object keys = in_float32(key, "key"), values = in_float32(value, "value");
    return attend<float>(query.attr("float")(), keys, values, paths, prefix, live, scale).attr("half")();
  }
  if (known && asked.dtype == border::DtypeOf<border::bfloat16>::dtype)
    return attend<border::bfloat16>(query, key, value, paths, prefix, live, scale);
  return attend<float>(query, key, value, paths, prefix, live, scale);
}

const Ops kAttention([](py::module_& module) { module.def("strict_cached_attention", strict_cached_attention); });

}  // namespace
}  // namespace ops
