// The update rules: the coefficients of one step of each, and the update of one element. To add a rule, add a struct to this file,
// and its name to the variant at its end.
#pragma once

#include <variant>

#include "kernels/number_math.h"

namespace ballast::kernels {

// A running mean or sum of squared gradients. The rules divide by the root, and some formats store it, so it is computed once.
// The value is at least 2^-120, so that it does not become subnormal when it decays, which makes an update several times slower
// on CPUs, and its root is never zero. An element without gradients stays at this value.
template <class F>
struct SecondMoment {
  F value;
  F root;

  constexpr void set(F new_value) {
    using U = BitsOf<F>;
    value = as_float(max(bits(new_value), U(0x03800000u)));
    root = sqrt(value);
  }
};

// A running mean of gradients: the first moment of a rule. The difference of the two loses what is small beside the larger one.
// So it is multiplied by the smaller weight, and added to the value whose weight is larger, as in torch.lerp(): without decay
// the mean is the gradient, whatever it was before.
struct RunningMean {
  float decay;            // the weight of the former mean
  float one_minus_decay;  // the weight of the gradient

  static constexpr RunningMean of(double decay) {
    return {.decay = static_cast<float>(decay), .one_minus_decay = static_cast<float>(1.0 - decay)};
  }

  template <class F>
  constexpr F operator()(F mean, F g) const {
    return decay < 0.5f ? fma(F(decay), mean - g, g) : fma(F(one_minus_decay), g - mean, mean);
  }
};

// --- AdamW and Adam ---

struct AdamW {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = true;

  float decay;  // 1 - lr * weight_decay
  RunningMean mean;
  float beta2;
  float one_minus_beta2;
  float inverse_root_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)

  template <class F>
  constexpr void update_moments(F& m, SecondMoment<F>& v, F g) const {
    m = mean(m, g);
    v.set(fma(F(one_minus_beta2) * g, g, F(beta2) * v.value));
  }
  template <class F>
  constexpr F updated_master(F p, F m, F root) const {
    const F denominator = fma(root, F(inverse_root_correction2), F(eps));
    return fma(F(-step_size), m / denominator, p * F(decay));
  }
  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>& v, F g) const {
    update_moments(m, v, g);
    p = updated_master(p, m, v.root);
  }
};

// Weight decay as part of the gradient (L2), as in torch.optim.Adam.
struct Adam {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = true;

  float l2;
  AdamW without_decay;  // its `decay` is 1

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>& v, F g) const {
    without_decay(p, m, v, fma(F(l2), p, g));
  }
};

// --- Stochastic gradient descent, without and with momentum ---

struct Sgd {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  float lr;
  float l2;

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>&, F g) const {
    p = fma(F(-lr), fma(F(l2), p, g), p);
  }
};

struct SgdMomentum {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;

  float lr;
  float l2;
  float momentum;
  float one_minus_dampening;  // 1 at a parameter's first step, as in torch
  float from_momentum;  // the step is from_momentum * m + from_gradient * g: (1, 0), or (momentum, 1) for Nesterov
  float from_gradient;

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>&, F g) const {
    g = fma(F(l2), p, g);
    m = fma(F(momentum), m, F(one_minus_dampening) * g);
    p = fma(F(-lr), fma(F(from_momentum), m, F(from_gradient) * g), p);
  }
};

// --- Lion (Chen et al., 2023) ---

struct Lion {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;

  float lr;
  float decay;       // 1 - lr * weight_decay
  RunningMean mean;  // the sign of the mean is the direction
  RunningMean kept_mean;

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>&, F g) const {
    const F direction = mean(m, g);
    const F zero(0.0f);
    const F sign = select(below(zero, direction), F(1.0f), select(below(direction, zero), F(-1.0f), zero));
    p = fma(F(-lr), sign, p * F(decay));
    m = kept_mean(m, g);
  }
};

// --- Adagrad. The variance stores the sum of squares. ---

struct Adagrad {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = true;

  float step_size;  // lr / (1 + (step - 1) * lr_decay)
  float l2;
  float eps;

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>& v, F g) const {
    g = fma(F(l2), p, g);
    v.set(fma(g, g, v.value));
    p = fma(F(-step_size), g / (v.root + F(eps)), p);
  }
};

// --- Muon (Jordan et al., 2024): two updates of an element. The first makes a direction, whose matrices are then orthogonalized
// (orthogonalize.h), and the second takes the step. ---

// The tile's parameter is the direction, in bf16, and it has no master.
struct MuonMomentum {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;
  static constexpr bool makes_direction = true;

  RunningMean mean;
  float from_momentum;  // the direction is from_momentum * m + from_gradient * g: (1, 0), or (momentum, 1 - momentum)
  float from_gradient;  // Nesterov momentum uses the latter

  template <class F>
  constexpr void operator()(F& direction, F& m, SecondMoment<F>&, F g) const {
    m = mean(m, g);
    direction = fma(F(from_momentum), m, F(from_gradient) * g);
  }
};

// The tile's gradient is the orthogonalized direction.
struct MuonStep {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  float decay;      // 1 - lr * weight_decay
  float step_size;  // lr, adjusted to the shape of the matrix

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>&, F direction) const {
    p = fma(F(-step_size), direction, p * F(decay));
  }
};

// --- No update: the trainer has changed the master itself. The walk only derives the parameter from it, as after every rule. ---

struct External {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  template <class F>
  constexpr void operator()(F&, F&, SecondMoment<F>&, F) const {}
};

// --- All rules ---

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, External, MuonMomentum, MuonStep>;

// A rule whose moments do not depend on the master, and whose master depends on the new moments alone.
template <class Rule>
concept UpdatesMomentsFirst = requires(const Rule rule, float x, SecondMoment<float> v) {
  rule.update_moments(x, v, x);
  rule.updated_master(x, x, x);
};

// A rule that has no master: its first argument is a direction, which walks write to the tile's parameter, rounded to nearest,
// ties to even. It starts at zero.
template <class Rule>
concept MakesDirection = requires {
  requires Rule::makes_direction;
};

}  // namespace ballast::kernels
