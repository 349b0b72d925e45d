// Key-value rows of the accepted path, all layers in one launch, in place.
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"
#include "spec/device_compaction.hpp"

namespace {

using namespace spec;

constexpr int kBlockSize = 128;

template <typename Piece>
__global__ void __launch_bounds__(kBlockSize)
    compact_kernel(Piece* slab, int64_t planes, int64_t slots, int row_pieces, const int64_t* path,
                   const int32_t* count, const int32_t* prefix) {
  const int64_t lane = static_cast<int64_t>(blockIdx.x) * kBlockSize + threadIdx.x;
  if (lane >= planes * row_pieces) return;
  const int64_t plane = lane / row_pieces, piece = lane % row_pieces;
  move_column(slab + (plane * slots + *prefix) * row_pieces + piece, row_pieces, path, *count);
}

template <typename Piece>
int launch(void* slab, int64_t planes, int64_t slots, int64_t row_bytes, const int64_t* path, const int32_t* count,
           const int32_t* prefix, void* stream) {
  const int64_t row_pieces = row_bytes / static_cast<int64_t>(sizeof(Piece));
  const int64_t blocks = (planes * row_pieces + kBlockSize - 1) / kBlockSize;
  compact_kernel<Piece><<<static_cast<unsigned>(blocks), kBlockSize, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Piece*>(slab), planes, slots, static_cast<int>(row_pieces), path, count, prefix);
  return cudaGetLastError();
}

}  // namespace

int spec_compact_kv(void* slab, int64_t planes, int64_t slots, int64_t row_bytes, const int64_t* path,
                    const int32_t* count, const int32_t* prefix, void* stream) {
  if (planes < 1 || slots < 1 || row_bytes < 1 || row_bytes > (1 << 20)) return cudaErrorInvalidValue;
  const bool aligned = row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(slab) % 16 == 0;
  // only rows of toy models are not made of 16-byte pieces
  return aligned ? launch<uint4>(slab, planes, slots, row_bytes, path, count, prefix, stream)
                 : launch<uint8_t>(slab, planes, slots, row_bytes, path, count, prefix, stream);
}
