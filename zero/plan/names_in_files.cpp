#include "zero/plan/names_in_files.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace ballast {

std::string describe(const optim::Rule& rule) {
  const std::size_t own = optim::state_names(rule).own_values;
  return fmt::format("{}{}", optim::name(rule), own == 0 ? "" : fmt::format(" with {} values of each element", own));
}

std::vector<std::vector<std::string>> names_of_whole_units(const Model& model) {
  const auto unit = std::ranges::find_if(model.units, [](const Unit& each) { return each.parts > 1; });
  require(unit == model.units.end(), Code::unsupported, [&] {
    return Problem{.what = "cannot save or load parts of a unit, such as experts: their tensors have the same names",
                   .where = "unit " + unit->name,
                   .needed = "files of the trainer's own; from Python, ballast.save() has names of all parts"};
  });
  return names_in_runs(model);
}

std::vector<std::vector<std::string>> names_in_runs(const Model& model) {
  std::map<std::string_view, std::size_t> times;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors)
      ++times[tensor.name];
  }
  std::vector<std::vector<std::string>> names(model.units.size());
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    const Unit& unit = model.units[i];
    for (const Tensor& tensor : unit.tensors)
      names[i].push_back(times[tensor.name] == 1 ? tensor.name : fmt::format("{}.{}", unit.name, tensor.name));
  }
  return names;
}

}  // namespace ballast
