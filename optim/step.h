// The coefficients of a rule at a step, ready for a backend.
#pragma once

#include <ballast/optim.h>

#include <cstdint>

#include "kernels/update.h"

namespace ballast::optim {

struct Step {
  std::uint64_t number = 1;      // of the parameter's update, counted from 1
  float gradient_factor = 1.0f;  // see decision.h
};

kernels::GroupStep at(const AdamW& rule, const Step& step);
kernels::GroupStep at(const Adam& rule, const Step& step);
kernels::GroupStep at(const Sgd& rule, const Step& step);
kernels::GroupStep at(const SgdMomentum& rule, const Step& step);
kernels::GroupStep at(const Lion& rule, const Step& step);
kernels::GroupStep at(const Adagrad& rule, const Step& step);
kernels::GroupStep at(const Muon& rule, const Step& step);  // the first of its two updates: see muon.h
kernels::GroupStep at(const External& rule, const Step& step);
kernels::GroupStep at(const Rule& rule, const Step& step);

constexpr float gradient_factor(const Step& step, bool maximize) {
  return maximize ? -step.gradient_factor : step.gradient_factor;
}

}  // namespace ballast::optim
