#include <ballast/error.h>
#include <ballast/model.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

namespace ballast {
namespace {

[[noreturn]] void refuse(std::string what, std::string where, std::string needed) {
  fail(Code::bad_argument, {.what = std::move(what), .where = std::move(where), .needed = std::move(needed)});
}

void check_names(const Unit& unit) {
  std::set<std::string_view> names;
  for (const Tensor& tensor : unit.tensors) {
    if (!names.insert(tensor.name).second) {
      refuse(fmt::format("two tensors are called {}", tensor.name), fmt::format("unit {}", unit.name), "one name each");
    }
  }
}

void check_blocks(const Unit& unit) {
  for (const Tensor& tensor : unit.tensors) {
    const std::size_t rows = std::accumulate(tensor.blocks.begin(), tensor.blocks.end(), std::size_t{0});
    const bool fits = tensor.shape.size() == 2 && rows == tensor.shape[0];
    const bool is_empty = std::ranges::find(tensor.blocks, 0u) != tensor.blocks.end();
    if (!tensor.blocks.empty() && (!fits || is_empty)) {
      refuse(fmt::format("cannot divide {} into blocks of {} rows", tensor.name, fmt::join(tensor.blocks, ", ")),
             fmt::format("unit {}", unit.name), "a matrix, and blocks of at least one row that together have its rows");
    }
  }
}

void check_ties(const Model& model, std::size_t index) {
  const Unit& unit = model.units[index];
  for (const Tie& tie : unit.ties) {
    const bool exists = tie.unit < model.units.size() && tie.tensor < model.units[tie.unit].tensors.size();
    if (!exists || tie.unit == index) {
      refuse(fmt::format("{} is tied to tensor {} of unit {}", tie.name, tie.tensor, tie.unit),
             fmt::format("unit {}", unit.name), "a tensor of another unit of the model");
    }
  }
}

}  // namespace

std::size_t Tensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

std::size_t Model::unit(std::string name, DType dtype) {
  units.push_back({.name = std::move(name), .dtype = dtype});
  return units.size() - 1;
}

TensorId Model::tensor(Tensor tensor) {
  if (units.empty())
    refuse(fmt::format("cannot add tensor {}: the model has no unit", tensor.name), "", "a call of unit() before");
  units.back().tensors.push_back(std::move(tensor));
  return {units.size() - 1, units.back().tensors.size() - 1};
}

TensorId Model::tied(std::string name, TensorId owner) {
  if (units.empty()) refuse(fmt::format("cannot tie {}: the model has no unit", name), "", "a call of unit() before");
  units.back().ties.push_back({std::move(name), owner.unit, owner.tensor});
  return owner;
}

std::size_t Model::group(std::string_view name) {
  const auto found = std::ranges::find(groups, name);
  const auto number = static_cast<std::size_t>(found - groups.begin());
  if (found == groups.end()) groups.emplace_back(name);
  return number;
}

std::size_t parts_of(const Model& model) {
  std::size_t most = 1;
  for (const Unit& unit : model.units)
    most = std::max(most, unit.parts);
  return most;
}

void check(const Model& model) {
  if (model.units.empty()) refuse("cannot train a model without units", "", "at least one unit");
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    const Unit& unit = model.units[i];
    if (!names.insert(unit.name).second) refuse(fmt::format("two units are called {}", unit.name), "", "one name each");
    if (unit.dtype == DType::u8 && !std::ranges::all_of(unit.tensors, &Tensor::frozen)) {
      refuse(fmt::format("cannot train parameters of {}", name(unit.dtype)), fmt::format("unit {}", unit.name),
             "fp32, bf16 or fp16; or frozen tensors only");
    }
    check_names(unit);
    check_blocks(unit);
    check_ties(model, i);
  }
}

}  // namespace ballast
