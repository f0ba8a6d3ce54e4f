// Gives memory of a training to Python and torch: host memory as a buffer, and that of the host or a GPU as a DLPack
// capsule, which needs no other package.
#include <fmt/format.h>

#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

// DLPack's structures in its first version, which every reader understands.
namespace dlpack {

constexpr const char* name_of_capsule = "dltensor";  // its reader gives it another one
constexpr std::int32_t on_cpu = 1;
constexpr std::int32_t on_cuda = 2;
constexpr std::uint8_t floats = 2;
constexpr std::uint8_t bfloats = 4;

struct Device {
  std::int32_t kind;
  std::int32_t number;
};
struct Type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t dimensions;
  Type type;
  std::int64_t* shape;
  std::int64_t* strides;  // null: without gaps
  std::uint64_t byte_offset;
};
struct Managed {
  Tensor tensor;
  void* owner;
  void (*release)(Managed*);
};

}  // namespace dlpack

struct DlpackExport {
  dlpack::Managed managed{};
  std::int64_t count = 0;
  py::object owner{};
};

dlpack::Type type_of(DType dtype) {
  require(dtype != DType::u8, Code::unsupported,
          [] { return Problem{.what = "cannot show bytes as values", .needed = "a floating-point format"}; });
  const auto bits = static_cast<std::uint8_t>(8 * byte_size(dtype));
  return {dtype == DType::bf16 ? dlpack::bfloats : dlpack::floats, bits, 1};
}

// Called by torch, from any thread.
void release_export(dlpack::Managed* managed) {
  const py::gil_scoped_acquire lock;
  delete static_cast<DlpackExport*>(managed->owner);
}

// Releases a capsule that no reader has taken.
void release_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, dlpack::name_of_capsule) == 0) return;
  auto* const managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, dlpack::name_of_capsule));
  managed->release(managed);
}

py::capsule dlpack_of(const Memory& memory, DType dtype, std::size_t first, std::size_t count) {
  const std::size_t available = memory.bytes / byte_size(dtype);
  require(first <= available && count <= available - first, Code::bad_argument, [&] {
    return Problem{.what = "cannot show values that are not in this memory",
                   .needed = fmt::format("{} from value {} on", count, first),
                   .available = fmt::format("{}", available)};
  });
  auto exported = std::make_unique<DlpackExport>();
  exported->count = static_cast<std::int64_t>(count);
  exported->owner = memory.owner;
  exported->managed = {.tensor = {.data = memory.data + first * byte_size(dtype),
                                  .device = {memory.gpu ? dlpack::on_cuda : dlpack::on_cpu, memory.gpu.value_or(0)},
                                  .dimensions = 1,
                                  .type = type_of(dtype),
                                  .shape = &exported->count,
                                  .strides = nullptr,
                                  .byte_offset = 0},
                       .owner = exported.get(),
                       .release = release_export};
  py::capsule capsule(&exported->managed, dlpack::name_of_capsule, release_capsule);
  exported.release();  // NOLINT(bugprone-unused-return-value): the capsule has it now
  return capsule;
}

py::buffer_info buffer_of(Memory& memory) {
  require(!memory.gpu, Code::bad_argument,
          [] { return Problem{.what = "cannot show memory of a GPU as a buffer", .needed = "memory of the host"}; });
  return {reinterpret_cast<std::uint8_t*>(memory.data), static_cast<py::ssize_t>(memory.bytes)};
}

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def_property_readonly("address",
                             [](const Memory& memory) { return reinterpret_cast<std::uintptr_t>(memory.data); })
      .def_readonly("bytes", &Memory::bytes)
      .def_readonly("gpu", &Memory::gpu)
      .def("dlpack", &dlpack_of, py::arg("dtype"), py::arg("first"), py::arg("count"))
      .def_buffer(buffer_of);
}

}  // namespace ballast::python
