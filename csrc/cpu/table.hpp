// Matrices of which a forward reads single outputs: packed, or left in the file where their rows stand as they are used.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/packing.hpp"
#include "cpu/platform.hpp"

namespace cpu {

// A file is not what it was when its rows began to be used.
struct FileChanged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The rows of a matrix in a file, one after the other from byte `offset` on. Copied, never mapped: whoever cuts a mapped file
// off ends the process.
class FileRows {
 public:
  FileRows(int descriptor, int64_t offset, int64_t row_bytes, std::string path)
      : file_(descriptor), offset_(offset), row_bytes_(row_bytes), path_(std::move(path)) {}

  int64_t row_bytes() const { return row_bytes_; }

  // On any thread; what is missing shows in `require_same`.
  void read(int64_t row, uint8_t* out) const {
    if (!file_.read(out, row_bytes_, offset_ + row * row_bytes_)) cut_off_ = true;
  }

  // Throws FileChanged unless the rows read so far are those of the beginning.
  void require_same() const {
    if (cut_off_ || !file_.is_same())
      throw FileChanged(path_ + " was changed while its model is in use: load it again once it is complete");
  }

 private:
  const OpenFile file_;
  const int64_t offset_, row_bytes_;
  const std::string path_;
  mutable std::atomic<bool> cut_off_{false};
};

class Table {
 public:
  Table() = default;
  explicit Table(const Matrix& matrix, std::shared_ptr<const FileRows> file = nullptr)
      : matrix_(matrix), file_(std::move(file)) {}

  int64_t outputs() const { return matrix_.outputs; }
  int64_t inputs() const { return matrix_.inputs; }
  int64_t width() const { return matrix_.blocks * kDepth; }  // of what `read` writes
  const Matrix& matrix() const { return matrix_; }

  // The numbers of one output: float [width].
  void read(const Kernels& kernels, int64_t output, float* out) const {
    if (!file_) return kernels.weights(matrix_, output, out);
    std::vector<uint8_t> row(static_cast<size_t>(file_->row_bytes()));
    file_->read(output, row.data());
    Matrix one = matrix_;
    one.outputs = one.panels = 1;
    std::vector<uint8_t> panel(static_cast<size_t>(panel_bytes(one.kind, one.blocks)) + 64);  // vectors read too far
    pack_panel(one, one.kind, row.data(), nullptr, 0, panel.data(), nullptr);
    one.data = panel.data();
    kernels.weights(one, 0, out);
  }

  // Throws FileChanged where rows of a file are no longer those of the beginning.
  void require_same() const {
    if (file_) file_->require_same();
  }

 private:
  Matrix matrix_;
  std::shared_ptr<const FileRows> file_;
};

}  // namespace cpu
