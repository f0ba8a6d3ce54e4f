// What trainings and plans are described by: the words from which users choose, models, placements, and the optimizer's rules.
// C++ defines the words once, and Python gets them as enumerations.
#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/state_format.h>

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "python/bindings/bindings.h"
#include "zero/plan/collective_memory.h"
#include "zero/plan/compile_input.h"
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
}

void bind_units(py::module_& module) {
  record<Tensor>(module, "Tensor", field("name", &Tensor::name), field("shape", &Tensor::shape), ByName(),
                 preset("group", &Tensor::group), preset("frozen", &Tensor::frozen),
                 preset("counted", &Tensor::counted), preset("number", &Tensor::number),
                 preset("blocks", &Tensor::blocks))
      .def_property_readonly("elements", &Tensor::elements);
  record<Tie>(module, "Tie", field("name", &Tie::name), ByName(), field("unit", &Tie::unit),
              field("tensor", &Tie::tensor));
  record<Unit>(module, "Unit", field("name", &Unit::name), ByName(), field("dtype", &Unit::dtype),
               field("tensors", &Unit::tensors), preset("ties", &Unit::ties), preset("parts", &Unit::parts));
  py::class_<Model>(module, "Model")
      .def(py::init([](std::vector<Unit> units) {
             Model model{std::move(units)};
             check(model);
             return model;
           }),
           py::arg("units"))
      .def_readonly("units", &Model::units);
  record<Visit>(module, "Visit", field("unit", &Visit::unit), field("phase", &Visit::phase));
  module.def(
      "visits", [](const Model& model, std::size_t unit, Phase phase) { return visits_of(model, unit, phase); },
      py::arg("model"), py::arg("unit"), py::arg("phase"),
      "The visits of one use of a unit: of the units whose tensors it has tied, and of itself.");
}

void bind_placement(py::module_& module) {
  readable<Spread>(module, "Spread", field("device", &Spread::device), field("host", &Spread::host),
                   field("nvme", &Spread::nvme))
      .def(py::init<double, double, double>(), py::kw_only(), py::arg("device") = 0.0, py::arg("host") = 0.0,
           py::arg("nvme") = 0.0)
      .def(
          "__eq__",
          [](const Spread& a, const py::object& b) {
            return py::isinstance<Spread>(b) && a == b.cast<const Spread&>();
          },
          py::is_operator());
  readable<Placement>(module, "Placement", field("shards", &Placement::shards), field("replicas", &Placement::replicas),
                      field("full_parameters", &Placement::full_parameters))
      .def_readwrite("parameter_replicas", &Placement::parameter_replicas)
      .def_readwrite("parameters", &Placement::parameters)
      .def_readwrite("gradients", &Placement::gradients)
      .def_readwrite("state", &Placement::state)
      .def("check", [](const Placement& placement) { check(placement); });
  module.def("placement_of_stage", &placement_of_stage, py::arg("stage"), py::arg("ranks"));

  py::class_<Wire>(module, "Wire")
      .def(py::init<>())
      .def_readwrite("gather", &Wire::gather)
      .def_readwrite("reduce", &Wire::reduce)
      .def_readwrite("across", &Wire::across)
      .def(
          "check", [](const Wire& wire, const Placement& placement) { check(wire, placement); }, py::arg("placement"));
}

// py::init passes arguments in the order of a struct's members: keep both the same.
template <class Rule>
void bind_adam(py::module_& module, const char* name) {
  py::class_<Rule>(module, name)
      .def(py::init<double, double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"),
           py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("maximize") = false,
           py::arg("amsgrad") = false);
}

// Binds the rules of <ballast/optim.h>.
void bind_rules(py::module_& module) {
  using namespace optim;
  bind_adam<AdamW>(module, "AdamW");
  bind_adam<Adam>(module, "Adam");
  py::class_<Sgd>(module, "Sgd")
      .def(py::init<double, double, bool>(), py::kw_only(), py::arg("lr"), py::arg("weight_decay"),
           py::arg("maximize") = false);
  py::class_<SgdMomentum>(module, "SgdMomentum")
      .def(py::init<double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"), py::arg("momentum"),
           py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov") = false, py::arg("maximize") = false);
  py::class_<Lion>(module, "Lion")
      .def(py::init<double, double, double, double, bool>(), py::kw_only(), py::arg("lr"), py::arg("beta1"),
           py::arg("beta2"), py::arg("weight_decay"), py::arg("maximize") = false);
  py::class_<Adagrad>(module, "Adagrad")
      .def(py::init<double, double, double, double, bool>(), py::kw_only(), py::arg("lr"), py::arg("lr_decay"),
           py::arg("weight_decay"), py::arg("eps"), py::arg("maximize") = false);
  py::class_<Muon>(module, "Muon")
      .def(py::init([](double lr, double momentum, bool nesterov, double weight_decay,
                       const std::array<double, 3>& ns_coefficients, int ns_steps, double eps, bool matches_adamw,
                       bool polar_express) {
             return Muon{.lr = lr,
                         .momentum = momentum,
                         .nesterov = nesterov,
                         .weight_decay = weight_decay,
                         .ns_coefficients = ns_coefficients,
                         .ns_steps = ns_steps,
                         .eps = eps,
                         .adjust_lr_fn = matches_adamw ? AdjustLr::match_rms_adamw : AdjustLr::original,
                         .orthogonalization =
                             polar_express ? Orthogonalization::polar_express : Orthogonalization::newton_schulz};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("nesterov"), py::arg("weight_decay"),
           py::arg("ns_coefficients"), py::arg("ns_steps"), py::arg("eps"), py::arg("matches_adamw") = false,
           py::arg("polar_express") = false);
  module.attr("MAX_CUSTOM_VALUES") = max_own_values;
  py::class_<External>(module, "External")
      .def(py::init([](std::size_t custom_values) { return External::with_values(custom_values); }), py::kw_only(),
           py::arg("custom_values") = 0);
  module.def(
      "check_rule", [](const Rule& rule) { check(rule); }, py::arg("rule"), "Raise an error if the rule is invalid.");
  module.def(
      "state_names",
      [](const Rule& rule) {
        const StateNames names = state_names(rule);
        return std::pair(std::string(names.momentum), std::string(names.variance));
      },
      py::arg("rule"), "The names of its moments; empty if it has none.");
}

}  // namespace

void bind_model(py::module_& module) {
  bind_names(module);
  bind_units(module);
  bind_placement(module);
  bind_rules(module);
}

}  // namespace ballast::python
