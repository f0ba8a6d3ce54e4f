// Loss scaling for fp16: the loss is multiplied before backward so that small gradients do not vanish, and the gradients
// are divided by the same number before the update.
#pragma once

#include <cstdint>

namespace ballast::optim {

struct LossScaleOptions {
  double initial = 65536.0;
  double growth = 2.0;
  double backoff = 0.5;
  std::uint64_t growth_interval = 2000;  // finite steps in a row before the scale grows
  double smallest = 1.0;
};

// A value: it changes only when after_step() is called, which is also when all gradients of the step are used up. So
// gradients can only ever be divided by the scale that they were made with.
class LossScale {
 public:
  explicit LossScale(const LossScaleOptions& options);

  double scale() const { return scale_; }  // for the losses of this step, and for unscaling their gradients
  std::uint64_t finite_steps() const { return finite_steps_; }
  void after_step(bool finite);

  // Continues from a checkpoint.
  void restore(double scale, std::uint64_t finite_steps);

 private:
  LossScaleOptions options_;
  double scale_;
  std::uint64_t finite_steps_ = 0;
};

}  // namespace ballast::optim
