// The optimizer's rules, under torch's names.
#include <ballast/optim.h>
#include <ballast/state_format.h>

#include <pybind11/stl.h>

#include "python/bindings/bindings.h"

namespace ballast::python {

void bind_rule(py::module_& module) {
  using namespace optim;
  py::class_<AdamW>(module, "AdamW")
      .def(py::init<double, double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"),
           py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("maximize") = false,
           py::arg("amsgrad") = false);
  py::class_<Adam>(module, "Adam")
      .def(py::init<double, double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"),
           py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("maximize") = false,
           py::arg("amsgrad") = false);
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

}  // namespace ballast::python
