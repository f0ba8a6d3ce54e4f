// The answers of a plan: memory by tier and owner, time by phase and lane.
#include "zero/plan/program_cost.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "python/bindings/by_name.h"
#include "zero/plan/simulate.h"

namespace ballast::python {
void bind_ledger(py::module_& module) {
  py::class_<LedgerEntry>(module, "LedgerEntry")
      .def_readonly("tier", &LedgerEntry::tier)
      .def_readonly("owner", &LedgerEntry::owner)
      .def_readonly("bytes", &LedgerEntry::bytes);
  py::class_<Simulation>(module, "Simulation")
      .def_readonly("seconds", &Simulation::seconds)
      .def_property_readonly("exposed", [](const Simulation& s) { return by_name<Phase>(s.exposed); })
      .def_property_readonly("busy", [](const Simulation& s) { return by_name<Lane>(s.busy); })
      .def_property_readonly("critical", [](const Simulation& s) { return by_name<Lane>(s.critical); })
      .def_property_readonly("bytes", [](const Simulation& s) { return by_name<Lane>(s.bytes); });
}

}  // namespace ballast::python
