// Whether a step is made, the checks of each rule's options, and its coefficients at a step.
#include <ballast/error.h>
#include <ballast/state_format.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/orthogonalize.h"
#include "optim/step.h"

namespace ballast::optim {

void check_max_norm(double max_norm) {
  require(max_norm > 0.0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot clip gradients to a norm of {}", max_norm),
                   .needed = "a number above 0, or no clipping"};
  });
}

Decision decide(const GradientFacts& facts, double max_norm) {
  check_max_norm(max_norm);
  require(facts.loss_scale > 0.0 && std::isfinite(facts.loss_scale) && facts.averaged_over >= 1.0, Code::bad_argument,
          [&] {
            return Problem{.what = fmt::format("cannot divide gradients by a loss scale of {} and average them over {}",
                                               facts.loss_scale, facts.averaged_over),
                           .needed = "a finite loss scale above 0, and at least one micro-step of one rank"};
          });
  const double divisor = facts.loss_scale * facts.averaged_over;
  const double norm = std::sqrt(facts.sum_of_squares) / divisor;
  if (!facts.finite || !std::isfinite(norm)) {
    return {.skip = true, .norm = norm, .gradient_factor = 0.0f};
  }
  const double clip = std::isfinite(max_norm) ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
  return {.skip = false, .norm = norm, .gradient_factor = static_cast<float>(clip / divisor)};
}

namespace {

// The checks that the rules share. Each names the rule, the option and its value; B1001, for amsgrad B1005.
struct Option {
  std::string_view rule;
  std::string_view name;
  double value;
};

// The callers write their comparisons so that NaN fails as well.
void require_range(bool holds, Option option, std::string_view range) {
  require(holds, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use {} with {} = {}", option.rule, option.name, option.value),
                   .needed = std::string(range),
                   .remedy = fmt::format("set {} to {}", option.name, range)};
  });
}

void require_not_negative(Option option) {
  require_range(option.value >= 0.0 && std::isfinite(option.value), option, "a finite number of at least 0");
}

void require_below_one(Option option) {
  require_range(option.value >= 0.0 && option.value < 1.0, option, "at least 0 and less than 1");
}

void refuse_amsgrad(std::string_view rule, bool amsgrad) {
  require(!amsgrad, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot use {} with amsgrad", rule),
                   .needed = "a third moment for every element, which no state format stores",
                   .remedy = "leave amsgrad off: its maximum grows the state by a third, and it rarely helps"};
  });
}

float gradient_factor(const Step& step, bool maximize) {
  return maximize ? -step.gradient_factor : step.gradient_factor;
}

// Shows each option of a rule by its name.
template <class Options, class Visit>
void each_option(const Options& of, const Visit& visit) {
  if constexpr (requires { of.lr; }) visit("lr", of.lr);
  if constexpr (requires { of.beta1; }) visit("beta1", of.beta1);
  if constexpr (requires { of.beta2; }) visit("beta2", of.beta2);
  if constexpr (requires { of.momentum; }) visit("momentum", of.momentum);
  if constexpr (requires { of.dampening; }) visit("dampening", of.dampening);
  if constexpr (requires { of.nesterov; }) visit("nesterov", of.nesterov);
  if constexpr (requires { of.lr_decay; }) visit("lr_decay", of.lr_decay);
  if constexpr (requires { of.weight_decay; }) visit("weight_decay", of.weight_decay);
  if constexpr (requires { of.eps; }) visit("eps", of.eps);
  if constexpr (requires { of.maximize; }) visit("maximize", of.maximize);
  if constexpr (requires { of.ns_steps; }) {
    visit("ns_coefficients", fmt::format("{}", fmt::join(of.ns_coefficients, ", ")));
    visit("ns_steps", of.ns_steps);
    visit("adjust_lr_fn", static_cast<int>(of.adjust_lr_fn));
    visit("orthogonalization", static_cast<int>(of.orthogonalization));
  }
  if constexpr (requires { of.with_values(0); }) visit("own values", of.state.own_values);
}

// Checks the numbers of a rule: rates are not negative, and weights of running means are below 1.
template <class Options>
void check_numbers(std::string_view rule, const Options& options) {
  each_option(options, [&](std::string_view name, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const double&>) {
      const bool is_weight = name.starts_with("beta") || (name == "momentum" && std::is_same_v<Options, Muon>);
      if (is_weight) {
        require_below_one({rule, name, value});
      } else if (name != "dampening") {
        require_not_negative({rule, name, value});
      }
    }
  });
}

template <class Options>
void check_adam(std::string_view rule, const Options& options) {
  check_numbers(rule, options);
  refuse_amsgrad(rule, options.amsgrad);
}

// Returns the power by IEEE operations alone, because the last bit of a library's pow() depends on the library and the processor.
// Numbers are sums of two doubles, so that the result is rounded once.
double power(double base, std::uint64_t exponent) {
  struct Number {
    double high, low;
  };
  const auto product = [](const Number& a, const Number& b) {
    const double high = a.high * b.high;
    return Number{high, std::fma(a.high, b.high, -high) + (a.high * b.low + a.low * b.high)};
  };
  Number result{1.0, 0.0};
  for (Number factor{base, 0.0}; exponent != 0; exponent >>= 1, factor = product(factor, factor)) {
    if ((exponent & 1) != 0) result = product(result, factor);
  }
  return result.high + result.low;
}

// The bias corrections are computed in double, once a step.
template <class Options>
kernels::AdamW coefficients(const Options& options, std::uint64_t step, double decay) {
  const double correction1 = 1.0 - power(options.beta1, step);
  const double correction2 = 1.0 - power(options.beta2, step);
  return {.decay = static_cast<float>(decay),
          .mean = kernels::RunningMean::of(options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
          .inverse_root_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
          .eps = static_cast<float>(options.eps),
          .step_size = static_cast<float>(options.lr / correction1)};
}

constexpr int most_steps = 99;
constexpr std::array<double, 3> default_coefficients = Muon{}.ns_coefficients;

// The polynomials of degree 5 of "The Polar Express" (arXiv 2505.16932), Algorithm 1, for singular values from 1/1000 to 1. The
// last one repeats. All but that are made for values that are larger by the safety factor, since rounding to bf16 may bring a
// value above 1.
constexpr double safety = 1.01;
constexpr std::array<double, 3> polar_express[] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375},
};

kernels::Quintic rounded(const std::array<double, 3>& coefficients, double scale) {
  const double s = scale;
  return {static_cast<float>(coefficients[0] / s), static_cast<float>(coefficients[1] / (s * s * s)),
          static_cast<float>(coefficients[2] / (s * s * s * s * s))};
}

kernels::Quintic polar_express_step(std::size_t number) {
  const std::size_t last = std::size(polar_express) - 1;
  return number < last ? rounded(polar_express[number], safety) : rounded(polar_express[last], 1.0);
}

void check_coefficients(const Muon& rule) {
  const auto& coefficients = rule.ns_coefficients;
  require(std::ranges::all_of(coefficients, [](double c) { return std::isfinite(c); }), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use Muon with ns_coefficients = {}", fmt::join(coefficients, ", ")),
                   .needed = "three finite numbers"};
  });
  const bool own = coefficients != default_coefficients;
  require(!own || rule.orthogonalization == Orthogonalization::newton_schulz, Code::bad_argument, [] {
    return Problem{.what = "cannot use Muon with ns_coefficients and Polar Express, which has coefficients of its own",
                   .needed = "one of the two",
                   .remedy = "leave ns_coefficients out, or choose Newton-Schulz"};
  });
}

}  // namespace

void AdamW::check() const { check_adam("AdamW", *this); }

static kernels::GroupStep group_step(const AdamW& rule, const Step& step) {
  return {coefficients(rule, step.number, 1.0 - rule.lr * rule.weight_decay), gradient_factor(step, rule.maximize)};
}

void Adam::check() const { check_adam("Adam", *this); }

static kernels::GroupStep group_step(const Adam& rule, const Step& step) {
  return {
      kernels::Adam{.l2 = static_cast<float>(rule.weight_decay), .without_decay = coefficients(rule, step.number, 1.0)},
      gradient_factor(step, rule.maximize)};
}

void Sgd::check() const { check_numbers("SGD", *this); }

static kernels::GroupStep group_step(const Sgd& rule, const Step& step) {
  return {kernels::Sgd{.lr = static_cast<float>(rule.lr), .l2 = static_cast<float>(rule.weight_decay)},
          gradient_factor(step, rule.maximize)};
}

void SgdMomentum::check() const {
  check_numbers("SGD", *this);
  require(!nesterov || (momentum > 0.0 && dampening == 0.0), Code::bad_argument, [] {
    return Problem{.what = "cannot use SGD with Nesterov momentum: it has no momentum, or dampening",
                   .needed = "momentum above 0 and dampening 0"};
  });
}

// torch uses the undamped gradient itself if there is no momentum, and leaves the buffer alone: it is needed again if a
// momentum comes back.
static kernels::GroupStep group_step(const SgdMomentum& rule, const Step& step) {
  if (rule.momentum == 0.0) {
    return group_step(Sgd{.lr = rule.lr, .weight_decay = rule.weight_decay, .maximize = rule.maximize}, step);
  }
  const double damped = step.number == 1 ? 0.0 : rule.dampening;
  return {kernels::SgdMomentum{.lr = static_cast<float>(rule.lr),
                               .l2 = static_cast<float>(rule.weight_decay),
                               .momentum = static_cast<float>(rule.momentum),
                               .one_minus_dampening = static_cast<float>(1.0 - damped),
                               .from_momentum = rule.nesterov ? static_cast<float>(rule.momentum) : 1.0f,
                               .from_gradient = rule.nesterov ? 1.0f : 0.0f},
          gradient_factor(step, rule.maximize)};
}

void Lion::check() const { check_numbers("Lion", *this); }

static kernels::GroupStep group_step(const Lion& rule, const Step& step) {
  return {kernels::Lion{.lr = static_cast<float>(rule.lr),
                        .decay = static_cast<float>(1.0 - rule.lr * rule.weight_decay),
                        .mean = kernels::RunningMean::of(rule.beta1),
                        .kept_mean = kernels::RunningMean::of(rule.beta2)},
          gradient_factor(step, rule.maximize)};
}

void Adagrad::check() const { check_numbers("Adagrad", *this); }

static kernels::GroupStep group_step(const Adagrad& rule, const Step& step) {
  const double decayed = rule.lr / (1.0 + static_cast<double>(step.number - 1) * rule.lr_decay);
  return {kernels::Adagrad{.step_size = static_cast<float>(decayed),
                           .l2 = static_cast<float>(rule.weight_decay),
                           .eps = static_cast<float>(rule.eps)},
          gradient_factor(step, rule.maximize)};
}

void Muon::check() const {
  check_numbers("Muon", *this);
  require(ns_steps >= 0 && ns_steps <= most_steps, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use Muon with ns_steps = {}", ns_steps),
                   .needed = fmt::format("0 to {}", most_steps),
                   .remedy = "set ns_steps to 5"};
  });
  check_coefficients(*this);
}

static kernels::GroupStep group_step(const Muon& rule, const Step& step) {
  return {kernels::MuonMomentum{.mean = kernels::RunningMean::of(rule.momentum),
                                .from_momentum = rule.nesterov ? static_cast<float>(rule.momentum) : 1.0f,
                                .from_gradient = rule.nesterov ? static_cast<float>(1.0 - rule.momentum) : 0.0f},
          step.gradient_factor};
}

kernels::NewtonSchulz orthogonalization_of(const Muon& rule) {
  const bool polar = rule.orthogonalization == Orthogonalization::polar_express;
  kernels::NewtonSchulz how{
      .steps = {}, .norm_factor = polar ? static_cast<float>(safety) : 1.0f, .eps = static_cast<float>(rule.eps)};
  for (std::size_t step = 0; step < static_cast<std::size_t>(rule.ns_steps); ++step) {
    how.steps.push_back(polar ? polar_express_step(step) : rounded(rule.ns_coefficients, 1.0));
  }
  return how;
}

double adjusted_lr(const Muon& rule, const kernels::MatrixShape& shape) {
  const auto rows = static_cast<double>(shape.rows);
  const auto columns = static_cast<double>(shape.columns);
  switch (rule.adjust_lr_fn) {
    case AdjustLr::match_rms_adamw: return rule.lr * 0.2 * std::sqrt(std::max(rows, columns));
    case AdjustLr::original: break;
  }
  return rule.lr * std::sqrt(std::max(1.0, rows / columns));
}

kernels::GroupStep step_of(const Muon& rule, const kernels::MatrixShape& shape) {
  return {kernels::MuonStep{.decay = static_cast<float>(1.0 - rule.lr * rule.weight_decay),
                            .step_size = static_cast<float>(adjusted_lr(rule, shape))},
          1.0f};
}

void External::check() const {
  require(state.momentum.empty() && state.variance.empty(), Code::bad_argument,
          [] { return Problem{.what = "cannot keep moments for the rule External", .needed = "own values alone"}; });
  require(state.own_values <= max_own_values, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot keep {} values of each element for the rule External", state.own_values),
                   .needed = fmt::format("at most {}", max_own_values)};
  });
}

static kernels::GroupStep group_step(const External&, const Step& step) {
  return {kernels::External{}, step.gradient_factor};
}

std::vector<std::pair<std::string, std::string>> named_options(const Rule& rule) {
  std::vector<std::pair<std::string, std::string>> options{{"rule", std::string(name(rule))}};
  const auto add = [&](std::string_view name, const auto& value) { options.emplace_back(name, fmt::to_string(value)); };
  std::visit([&](const auto& of) { each_option(of, add); }, rule);
  return options;
}

kernels::GroupStep at(const Rule& rule, const Step& step) {
  return std::visit([&](const auto& r) { return group_step(r, step); }, rule);
}

}  // namespace ballast::optim
