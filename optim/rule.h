// All update rules. To add one, write a file with its options next to this one, and add its name here.
#pragma once

#include <array>
#include <string_view>
#include <variant>

#include "optim/adagrad.h"
#include "optim/adamw.h"
#include "optim/external.h"
#include "optim/lion.h"
#include "optim/sgd.h"

namespace ballast::optim {

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, External>;

// The descriptions of runs contain it, so it never changes.
inline std::string_view name(const Rule& rule) {
  constexpr std::array<std::string_view, std::variant_size_v<Rule>> names{
      "AdamW", "Adam", "SGD", "SGD with momentum", "Lion", "Adagrad", "of the trainer's own"};
  return names[rule.index()];
}

inline StateNames state_names(const Rule& rule) {
  return std::visit([](const auto& r) { return r.state; }, rule);
}

// Throws what is wrong with the options.
inline void check(const Rule& rule) {
  std::visit([](const auto& r) { r.check(); }, rule);
}

// The step of a rule, ready for a backend.
inline kernels::GroupStep at(const Rule& rule, const Step& step) {
  return std::visit([&](const auto& r) { return r.at(step); }, rule);
}

}  // namespace ballast::optim
