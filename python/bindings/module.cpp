// The extension ballast._core: the C++ library as it is, for the Python files of the package only. Users import the
// package.
#include "python/bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace ballast::python;
  module.doc() = "Ballast's C++ core; use the package `ballast`, which wraps it.";
  module.attr("version") = BALLAST_VERSION;
  bind_errors(module);
  bind_model(module);
  bind_plan(module);
  bind_this_machine(module);
  bind_group(module);
  bind_memory(module);
  bind_checkpoint(module);
  bind_training(module);
  bind_activations(module);
}
