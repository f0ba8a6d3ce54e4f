// All update rules. Adding one is a file beside this with its options, and its name here.
#pragma once

#include <variant>

#include "optim/adagrad.h"
#include "optim/adamw.h"
#include "optim/external.h"
#include "optim/lion.h"
#include "optim/sgd.h"

namespace ballast::optim {

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, External>;

inline StateNames state_names(const Rule& rule) {
  return std::visit([](const auto& r) { return r.state; }, rule);
}

// Throws what is wrong with the options.
inline void check(const Rule& rule) {
  std::visit([](const auto& r) { r.check(); }, rule);
}

// What the rule does in a step, ready for a backend.
inline kernels::GroupStep at(const Rule& rule, const Step& step) {
  return std::visit([&](const auto& r) { return r.at(step); }, rule);
}

}  // namespace ballast::optim
