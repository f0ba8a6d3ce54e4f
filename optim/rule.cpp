#include "optim/step.h"

namespace ballast::optim {

kernels::GroupStep at(const External&, const Step& step) { return {kernels::External{}, step.gradient_factor}; }

kernels::GroupStep at(const Rule& rule, const Step& step) {
  return std::visit([&](const auto& r) { return at(r, step); }, rule);
}

}  // namespace ballast::optim
