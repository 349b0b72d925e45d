// Tensors as the extensions take them: an address is used only after dtype, device, sizes and strides were checked.
//
// Torch 2.10 and later hand them out through DLPack's C exchange API, in some tens of nanoseconds; earlier ones through
// Python's attributes. The structures of DLPack are declared here, as far as they are read. Source: dlpack.h 1.3.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace border {

namespace py = pybind11;

// ---- what DLPack calls DLTensor, DLPackExchangeAPI

struct LentTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t rank;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* sizes;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  void* earlier;
  void *allocate, *take_over, *give;
  int (*lend)(void* object, LentTensor* out);  // may be null; the sizes stay the tensor's own
  void* stream;
};

constexpr int32_t kHost = 1;  // kDLCPU
enum Code : uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

// ---- dtypes

struct Dtype {
  uint8_t code, bits;
  bool operator==(const Dtype& other) const { return code == other.code && bits == other.bits; }
};

struct bfloat16 {
  uint16_t bits;
};

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype dtype{kFloat, 32};
  static constexpr const char* name = "float32";
};
template <>
struct DtypeOf<bfloat16> {
  static constexpr Dtype dtype{kBfloat, 16};
  static constexpr const char* name = "bfloat16";
};
template <>
struct DtypeOf<int64_t> {
  static constexpr Dtype dtype{kInt, 64};
  static constexpr const char* name = "int64";
};
template <>
struct DtypeOf<uint64_t> {  // words of bits, for which torch has int64
  static constexpr Dtype dtype{kInt, 64};
  static constexpr const char* name = "int64";
};
template <>
struct DtypeOf<int32_t> {
  static constexpr Dtype dtype{kInt, 32};
  static constexpr const char* name = "int32";
};
template <>
struct DtypeOf<uint8_t> {
  static constexpr Dtype dtype{kUnsigned, 8};
  static constexpr const char* name = "uint8";
};
template <>
struct DtypeOf<bool> {
  static constexpr Dtype dtype{kBool, 8};
  static constexpr const char* name = "bool";
};

// ---- sizes that are accepted

constexpr int64_t kAny = -1;
constexpr int64_t at_least(int64_t size) { return -2 - size; }
using Sizes = std::initializer_list<int64_t>;

inline std::string shown(Sizes wanted) {
  std::string text = "[";
  for (const int64_t size : wanted) {
    if (text.size() > 1) text += ", ";
    text += size == kAny ? "any" : size < kAny ? "at least " + std::to_string(-2 - size) : std::to_string(size);
  }
  return text + "]";
}

// Describe an argument for an error message.
inline std::string described(py::handle object) {
  try {
    if (!py::hasattr(object, "dtype") || !py::hasattr(object, "shape"))
      return std::string(py::str(py::type::handle_of(object).attr("__name__")));
    std::string text = py::str(object.attr("dtype"));
    if (text.rfind("torch.", 0) == 0) text = text.substr(6);
    text += " " + std::string(py::str(py::list(object.attr("shape"))));
    if (py::hasattr(object, "device")) text += " on " + std::string(py::str(object.attr("device")));
    const std::string type = py::str(py::type::handle_of(object).attr("__name__"));
    if (type != "Tensor" && type != "Parameter") text += " (" + type + ")";
    if (py::hasattr(object, "is_contiguous") && !py::cast<bool>(object.attr("is_contiguous")())) text += ", with strides";
    return text;
  } catch (const py::error_already_set&) {
    return py::str(py::type::handle_of(object).attr("__name__"));
  }
}

[[noreturn]] inline void refuse(const char* name, const std::string& given, const std::string& accepted) {
  throw std::invalid_argument(std::string(name) + ": got " + given + ", accepted " + accepted);
}

inline void require(bool holds, const char* name, int64_t given, const std::string& accepted) {
  if (!holds) refuse(name, std::to_string(given), accepted);
}

// ---- reading one

// A tensor on the CPU, of whatever dtype: a copy of its sizes and strides. It lends its memory for as long as it lives.
struct Tensor {
  static constexpr int kMostAxes = 5;
  void* data = nullptr;
  Dtype dtype{0, 0};
  int rank = 0;
  int64_t sizes[kMostAxes] = {}, strides[kMostAxes] = {};

  explicit operator bool() const { return data != nullptr; }
  int64_t size(int axis) const { return sizes[axis]; }
  int64_t count() const {
    int64_t product = 1;
    for (int axis = 0; axis < rank; ++axis) product *= sizes[axis];
    return product;
  }
  int64_t bytes() const { return count() * (dtype.bits / 8); }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int axis = rank - 1; axis >= 0; expected *= sizes[axis--])
      if (sizes[axis] > 1 && strides[axis] != expected) return count() == 0;
    return true;
  }
  // Along an axis, whatever the others are like.
  bool is_dense(int axis) const { return sizes[axis] <= 1 || strides[axis] == 1 || count() == 0; }
  bool fits(Sizes wanted) const {
    if (rank != static_cast<int>(wanted.size())) return false;
    const int64_t* size = sizes;
    for (const int64_t want : wanted) {
      if (want >= 0 ? *size != want : want < kAny && *size < -2 - want) return false;
      ++size;
    }
    return true;
  }
};

// Types and functions of torch and Python, found once by `start`.
struct Torch {
  PyTypeObject* tensor = nullptr;
  int (*lend)(void* object, LentTensor* out) = nullptr;
  py::handle new_empty;  // the name of the method
};

inline Torch& torch() {
  static Torch known;
  return known;
}

// An empty tensor of a dtype on the CPU, for its `new_empty`: that takes two thirds of what torch.empty does, whatever the
// process's defaults are.
template <typename T>
py::handle blank() {
  static const py::handle made = [] {
    const py::module_ library = py::module_::import("torch");
    return library.attr("empty")(0, py::arg("dtype") = library.attr(DtypeOf<T>::name), py::arg("device") = "cpu").release();
  }();
  return made;
}

// Raise std::invalid_argument as InputError, which is a ValueError.
inline void raise_input_errors() {
  static const py::handle type = py::object(py::module_::import("specengine.errors").attr("InputError")).release();
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

// To be called when an extension is imported.
inline void start() {
  raise_input_errors();
  torch().new_empty = py::str("new_empty").release();
  const py::object type = py::module_::import("torch").attr("Tensor");
  torch().tensor = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  if (!py::hasattr(type, "__dlpack_c_exchange_api__")) return;
  const py::object capsule = type.attr("__dlpack_c_exchange_api__");
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table) PyErr_Clear();
  if (table && table->version.major == 1) torch().lend = table->lend;
}

inline bool lent(py::handle object, Tensor& out) {
  LentTensor given{};
  if (torch().lend(object.ptr(), &given) != 0) {
    PyErr_Clear();
    return false;
  }
  if (given.device.type != kHost || given.dtype.lanes != 1 || given.rank > Tensor::kMostAxes) return false;
  out.data = static_cast<char*>(given.data) + given.byte_offset;
  out.dtype = {given.dtype.code, given.dtype.bits};
  out.rank = given.rank;
  for (int axis = given.rank - 1; axis >= 0; --axis) {
    out.sizes[axis] = given.sizes[axis];
    const int64_t dense = axis + 1 < given.rank ? out.strides[axis + 1] * out.sizes[axis + 1] : 1;
    out.strides[axis] = given.strides ? given.strides[axis] : dense;
  }
  return true;
}

inline Dtype dtype_named(const std::string& name) {
  static const std::pair<const char*, Dtype> known[] = {
      {"torch.float32", {kFloat, 32}}, {"torch.bfloat16", {kBfloat, 16}}, {"torch.float16", {kFloat, 16}},
      {"torch.float64", {kFloat, 64}}, {"torch.int64", {kInt, 64}},       {"torch.int32", {kInt, 32}},
      {"torch.uint8", {kUnsigned, 8}}, {"torch.bool", {kBool, 8}}};
  for (const auto& [each, dtype] : known)
    if (name == each) return dtype;
  return {0, 0};
}

// Read what `lent` reads, for a torch without the exchange API.
inline bool read_attributes(py::handle object, Tensor& out) {
  try {
    const std::string layout = py::str(object.attr("layout")), device = py::str(object.attr("device").attr("type"));
    const py::tuple sizes(object.attr("shape"));
    if (layout != "torch.strided" || device != "cpu" || sizes.size() > Tensor::kMostAxes) return false;
    const py::tuple strides = object.attr("stride")();
    out.rank = static_cast<int>(sizes.size());
    for (int axis = 0; axis < out.rank; ++axis) {
      out.sizes[axis] = py::cast<int64_t>(sizes[static_cast<size_t>(axis)]);
      out.strides[axis] = py::cast<int64_t>(strides[static_cast<size_t>(axis)]);
    }
    out.dtype = dtype_named(py::str(object.attr("dtype")));
    out.data = reinterpret_cast<void*>(py::cast<uintptr_t>(object.attr("data_ptr")()));
    return true;
  } catch (const py::error_already_set&) {
    return false;
  }
}

// False where it is no tensor in memory of this process: on another device, sparse, a subclass without storage.
inline bool read(py::handle object, Tensor& out) {
  if (Py_TYPE(object.ptr()) != torch().tensor && !PyType_IsSubtype(Py_TYPE(object.ptr()), torch().tensor)) return false;
  if (!(torch().lend ? lent(object, out) : read_attributes(object, out))) return false;
  return out.data || out.count() == 0;
}

// ---- taking one as an argument; std::invalid_argument, ValueError in Python, names it otherwise

template <typename T>
struct Array : Tensor {
  T* at() const { return static_cast<T*>(data); }
  T& operator[](int64_t i) const { return at()[i]; }
};

template <typename T>
[[noreturn]] void refuse_array(py::handle object, const char* name, const std::string& sizes) {
  refuse(name, described(object), std::string(DtypeOf<T>::name) + " " + sizes + ", contiguous, on the CPU");
}

// Contiguous and aligned, of these sizes.
template <typename T>
Array<T> take(py::handle object, const char* name, Sizes wanted) {
  Array<T> out;
  if (!read(object, out) || !(out.dtype == DtypeOf<T>::dtype) || !out.fits(wanted) || !out.is_contiguous() ||
      reinterpret_cast<uintptr_t>(out.data) % alignof(T) != 0)
    refuse_array<T>(object, name, shown(wanted));
  return out;
}

// Take an array of any shape that is contiguous and aligned.
template <typename T>
Array<T> take_flat(py::handle object, const char* name, int64_t count = kAny) {
  Array<T> out;
  if (!read(object, out) || !(out.dtype == DtypeOf<T>::dtype) || !out.is_contiguous() ||
      (count >= 0 ? out.count() != count : count < kAny && out.count() < -2 - count) ||
      reinterpret_cast<uintptr_t>(out.data) % alignof(T) != 0)
    refuse_array<T>(object, name, count == kAny ? "of any shape" : "of elements " + shown({count}));
  return out;
}

// An input, which is never written. One with strides is copied; the copy lives as long as this object.
template <typename T>
struct Input : Array<T> {
  py::object copy;
};

template <typename T>
bool read_input(py::handle object, Input<T>& out) {
  if (!read(object, out)) return false;
  if (!out.is_contiguous()) {
    out.copy = object.attr("contiguous")();
    if (!read(out.copy, out)) return false;
  }
  return out.dtype == DtypeOf<T>::dtype && reinterpret_cast<uintptr_t>(out.data) % alignof(T) == 0;
}

// Take inputs as `take`, `take_flat` and `take_or_none` do, copied where needed.
template <typename T>
Input<T> take_input(py::handle object, const char* name, Sizes wanted) {
  Input<T> out;
  if (!read_input(object, out) || !out.fits(wanted)) refuse_array<T>(object, name, shown(wanted));
  return out;
}

template <typename T>
Input<T> take_flat_input(py::handle object, const char* name, int64_t count = kAny) {
  Input<T> out;
  if (!read_input(object, out) || (count >= 0 ? out.count() != count : count < kAny && out.count() < -2 - count))
    refuse_array<T>(object, name, count == kAny ? "of any shape" : "of elements " + shown({count}));
  return out;
}

template <typename T>
Input<T> take_input_or_none(py::handle object, const char* name, Sizes wanted) {
  return object.is_none() ? Input<T>{} : take_input<T>(object, name, wanted);
}

template <typename T>
Array<T> take_or_none(py::handle object, const char* name, Sizes wanted) {
  return object.is_none() ? Array<T>{} : take<T>(object, name, wanted);
}

// A new tensor, and the object that Python has of it.
template <typename T>
struct Made : Array<T> {
  py::object object;
};

template <typename T>
Made<T> make(Sizes sizes) {
  py::tuple shape(sizes.size());
  py::ssize_t axis = 0;
  for (const int64_t size : sizes) shape[static_cast<size_t>(axis++)] = py::int_(size);
  Made<T> out;
  PyObject* made = PyObject_CallMethodObjArgs(blank<T>().ptr(), torch().new_empty.ptr(), shape.ptr(), nullptr);
  if (!made) throw py::error_already_set();
  out.object = py::reinterpret_steal<py::object>(made);
  if (!read(out.object, out)) throw std::runtime_error("a new tensor cannot be read");
  return out;
}

// An int32 tensor of one element.
inline py::object make_count(int64_t value) {
  auto out = make<int32_t>({1});
  out[0] = static_cast<int32_t>(value);
  return out.object;
}

// One element, [1].
template <typename T>
T& take_one(py::handle object, const char* name) {
  return take<T>(object, name, {1})[0];
}

template <typename T>
T one_or(py::handle object, const char* name, T without) {
  return object.is_none() ? without : take_one<T>(object, name);
}

// A tensor of one element or a number of Python; `without` where it is None.
template <typename T>
T number_or(py::handle object, const char* name, T without) {
  if (object.is_none()) return without;
  if (std::is_floating_point_v<T> && PyFloat_Check(object.ptr())) return static_cast<T>(PyFloat_AS_DOUBLE(object.ptr()));
  if (!PyLong_Check(object.ptr())) return take_one<T>(object, name);
  int overflows = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflows);
  if (overflows) refuse(name, "a number of more than 64 bits", DtypeOf<T>::name);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(std::clamp<long long>(value, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
  else
    return static_cast<T>(value);
}

// A count, which may say more than there is room for.
inline int64_t take_count(py::handle object, const char* name, int64_t most) {
  return std::clamp<int64_t>(take_one<int32_t>(object, name), 0, most);
}

// Rows of float32 or bfloat16 that lie densely, at any distance.
struct Rows : Tensor {
  bool half() const { return dtype == DtypeOf<bfloat16>::dtype; }
  int64_t rows() const { return sizes[0]; }
  int64_t columns() const { return sizes[1]; }
  int64_t stride() const { return strides[0]; }
  const float* floats() const { return static_cast<const float*>(data); }
  const uint16_t* halves() const { return static_cast<const uint16_t*>(data); }
};

inline bool is_real(const Tensor& given) {
  return (given.dtype == DtypeOf<float>::dtype || given.dtype == DtypeOf<bfloat16>::dtype) &&
         reinterpret_cast<uintptr_t>(given.data) % (given.dtype.bits / 8) == 0;
}

inline Rows take_rows(py::handle object, const char* name, int64_t least_columns = 0) {
  Rows out;
  if (!read(object, out) || !is_real(out) || out.rank != 2 || !out.is_dense(1) || out.sizes[1] < least_columns)
    refuse(name, described(object),
           "float32 or bfloat16 " + shown({kAny, at_least(least_columns)}) + ", dense rows, on the CPU");
  return out;
}

// Rows as of `take_rows`; rows of float16 are copied to float32, strided rows as they are. The copy lives as long
// as this object.
struct RowsInput : Rows {
  py::object copy;
};

inline RowsInput take_rows_input(py::handle object, const char* name, int64_t least_columns = 0) {
  RowsInput out;
  const bool known = read(object, out) && out.rank == 2;
  if (known && out.dtype == Dtype{kFloat, 16})
    out.copy = object.attr("float")().attr("contiguous")();
  else if (known && !out.is_dense(1))
    out.copy = object.attr("contiguous")();
  static_cast<Rows&>(out) = take_rows(out.copy ? out.copy : py::reinterpret_borrow<py::object>(object), name, least_columns);
  return out;
}

// Contiguous, float32 or bfloat16, of these sizes.
inline Tensor take_real(py::handle object, const char* name, Sizes wanted) {
  Tensor out;
  if (!read(object, out) || !is_real(out) || !out.fits(wanted) || !out.is_contiguous())
    refuse(name, described(object), "float32 or bfloat16 " + shown(wanted) + ", contiguous, on the CPU");
  return out;
}

// The tensors of a list or tuple of this length.
class Parts {
 public:
  Parts(py::handle object, const char* name, py::ssize_t length) : held_(sequence(object, name)) {
    const auto found = PySequence_Fast_GET_SIZE(held_.ptr());
    if (length >= 0 && found != length) refuse(name, std::to_string(found) + " parts", std::to_string(length));
  }
  py::handle operator[](py::ssize_t i) const { return PySequence_Fast_GET_ITEM(held_.ptr(), i); }
  py::ssize_t size() const { return PySequence_Fast_GET_SIZE(held_.ptr()); }

 private:
  static py::object sequence(py::handle object, const char* name) {
    if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) refuse(name, described(object), "a list or a tuple");
    return py::reinterpret_steal<py::object>(PySequence_Fast(object.ptr(), name));
  }
  py::object held_;
};

// Every value in [0, end).
template <typename T>
void require_below(const T* values, int64_t count, int64_t end, const char* name) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || static_cast<int64_t>(values[i]) >= end)
      refuse(name, std::to_string(static_cast<int64_t>(values[i])), "0 to " + std::to_string(end - 1));
}

}  // namespace border
