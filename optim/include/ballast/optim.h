// The update rules: their options, with the names, defaults and meaning of torch.optim. A training takes one rule for each
// parameter group, all of one kind.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <variant>

namespace ballast::optim {

// The state that a rule keeps of each element: its moments, under torch's names, which are empty where a rule has none; and how
// many values a trainer keeps for its own rule.
struct StateNames {
  std::string_view momentum{};
  std::string_view variance{};
  std::size_t own_values = 0;

  bool operator==(const StateNames&) const = default;
};

// check() of each rule throws B1001 for a wrong option, and B1005 for one that is not supported.

struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // decoupled: it shrinks the parameter, and the moments do not see it
  bool maximize = false;
  bool amsgrad = false;  // not supported

  static constexpr StateNames state{.momentum = "exp_avg", .variance = "exp_avg_sq"};
  void check() const;
};

struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // L2: added to the gradient
  bool maximize = false;
  bool amsgrad = false;  // not supported

  static constexpr StateNames state{.momentum = "exp_avg", .variance = "exp_avg_sq"};
  void check() const;
};

// Stochastic gradient descent without momentum, which keeps no state.
struct Sgd {
  double lr = 1e-3;
  double weight_decay = 0.0;  // L2: added to the gradient
  bool maximize = false;

  static constexpr StateNames state{};
  void check() const;
};

struct SgdMomentum {
  double lr = 1e-3;
  double momentum = 0.9;
  double dampening = 0.0;  // ignored at a parameter's first update, as in torch
  double weight_decay = 0.0;
  bool nesterov = false;  // needs a momentum and no dampening
  bool maximize = false;

  static constexpr StateNames state{.momentum = "momentum_buffer"};
  void check() const;
};

// Chen et al., 2023: the sign of an interpolated momentum, with decoupled weight decay.
struct Lion {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  bool maximize = false;

  static constexpr StateNames state{.momentum = "exp_avg"};
  void check() const;
};

struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double weight_decay = 0.0;  // L2: added to the gradient
  double eps = 1e-10;
  bool maximize = false;

  static constexpr StateNames state{.variance = "sum"};
  void check() const;
};

// The learning rate of a matrix: times sqrt(max(1, rows / columns)), or times 0.2 sqrt(max(rows, columns)), which gives updates
// the size of AdamW's.
enum class AdjustLr : std::uint8_t { original, match_rms_adamw };

// How the singular values are brought to 1: by the same step each time, which leaves them between 0.7 and 1.2, or by the steps
// of Polar Express (Amsel et al., 2025), each the best for what the one before left.
enum class Orthogonalization : std::uint8_t { newton_schulz, polar_express };

// Jordan et al., 2024: momentum whose matrices are orthogonalized. All trained tensors are matrices; Tensor::blocks divides them
// into parts that are orthogonalized apart. Polar Express is not in torch.
struct Muon {
  double lr = 1e-3;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;                                       // decoupled, and not adjusted to the shape
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};  // Polar Express has its own instead
  int ns_steps = 5;
  double eps = 1e-7;  // a smaller norm of a matrix counts as this
  AdjustLr adjust_lr_fn = AdjustLr::original;
  Orthogonalization orthogonalization = Orthogonalization::newton_schulz;

  static constexpr StateNames state{.momentum = "momentum_buffer"};
  void check() const;
};

// The trainer makes the updates itself, in StepOptions::update. The state of its rule is its own: values of fp32 that the library
// keeps for it, in any tier, or what it keeps elsewhere.
struct External {
  StateNames state{};  // own_values alone

  static External with_values(std::size_t count) { return {.state = {.own_values = count}}; }
  void check() const;
};

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, Muon, External>;

// Returns the rule's name. `names` has the order of the variant. Descriptions of runs contain a name, so it never changes.
inline std::string_view name(const Rule& rule) {
  constexpr std::array<std::string_view, std::variant_size_v<Rule>> names{
      "AdamW", "Adam", "SGD", "SGD with momentum", "Lion", "Adagrad", "Muon", "of the trainer's own"};
  return names[rule.index()];
}

inline StateNames state_names(const Rule& rule) {
  return std::visit([](const auto& r) { return r.state; }, rule);
}

// Returns the number of steps for each matrix; none for a rule that does not orthogonalize.
inline std::optional<std::size_t> orthogonalization_steps(const Rule& rule) {
  const auto* const muon = std::get_if<Muon>(&rule);
  if (muon == nullptr) return std::nullopt;
  return static_cast<std::size_t>(std::max(muon->ns_steps, 0));  // check() refuses fewer
}

inline void check(const Rule& rule) {
  std::visit([](const auto& r) { r.check(); }, rule);
}

inline constexpr double no_clipping = std::numeric_limits<double>::infinity();  // a norm of gradients

}  // namespace ballast::optim
