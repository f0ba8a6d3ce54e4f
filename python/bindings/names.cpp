// The words from which users choose: C++ defines them once, and Python gets them as enumerations.
#include <ballast/placement.h>
#include <ballast/state_format.h>

#include <pybind11/native_enum.h>

#include "python/bindings/bindings.h"
#include "zero/plan/program.h"

namespace ballast::python {
namespace {

template <class Enum>
void bind(py::module_& module, const char* type, std::initializer_list<Enum> values) {
  py::native_enum<Enum> names(module, type, "enum.Enum");
  for (const Enum value : values) {
    names.value(std::string(name(value)).c_str(), value);
  }
  names.finalize();
}

}  // namespace

void bind_names(py::module_& module) {
  bind(module, "DType", {DType::fp32, DType::bf16, DType::fp16, DType::u8});
  bind(module, "Tier", {Tier::device, Tier::host, Tier::nvme});
  bind(module, "Phase", {Phase::forward, Phase::backward, Phase::step});
  bind(module, "Lane",
       {Lane::compute, Lane::gather, Lane::reduce, Lane::upload, Lane::download, Lane::update, Lane::host, Lane::disk,
        Lane::fetch});
  bind(module, "StateFormat",
       {StateFormat::fp32, StateFormat::split, StateFormat::bf16, StateFormat::compact, StateFormat::four_bit});
  bind(module, "GradientFormat", {GradientFormat::fp32, GradientFormat::bf16});
  bind(module, "WireFormat", {WireFormat::exact, WireFormat::int8, WireFormat::int4});
  py::native_enum<Reduction>(module, "Reduction", "enum.Enum")
      .value("each", Reduction::each)
      .value("boundary", Reduction::boundary)
      .finalize();
}

}  // namespace ballast::python
