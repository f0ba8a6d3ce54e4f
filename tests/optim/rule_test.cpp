#include <ballast/optim.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/backend.h"
#include "optim/step.h"
#include "tests/digest.h"
#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::optim;

TEST_CASE("AdamW's coefficients are its options with the bias corrections of the step") {
  const AdamW options{.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1};
  const auto step = at(options, {.number = 7, .gradient_factor = 0.25f});
  const auto& rule = std::get<kernels::AdamW>(step.rule);
  CHECK(step.gradient_factor == 0.25f);
  CHECK(rule.decay == static_cast<float>(1 - 3e-4 * 0.1));
  CHECK(rule.step_size == static_cast<float>(3e-4 / (1 - std::pow(0.9, 7))));
  CHECK(rule.inverse_root_correction2 == static_cast<float>(1 / std::sqrt(1 - std::pow(0.95, 7))));
  CHECK(rule.mean.decay == 0.9f);
  CHECK(rule.mean.one_minus_decay == static_cast<float>(1 - 0.9));
  CHECK(rule.one_minus_beta2 == static_cast<float>(1 - 0.95));
}

TEST_CASE("bias corrections keep their precision at the first step") {
  const auto step = at(AdamW{.beta2 = 0.999999}, {.number = 1});
  const double correction = 1.0 / std::pow(std::get<kernels::AdamW>(step.rule).inverse_root_correction2, 2);
  CHECK(correction == Approx(1e-6).epsilon(1e-6));
}

// The value was recorded on x86-64.
TEST_CASE("coefficients have the recorded bits at every step") {
  testing::Digest digest;
  for (const double beta : {0.9, 0.999, 0.95, 0.9999999}) {
    for (std::uint64_t number = 1; number < 20'000; number += 1 + number / 50) {
      const auto rule = std::get<kernels::AdamW>(at(AdamW{.beta1 = beta, .beta2 = beta}, {.number = number}).rule);
      digest.add(std::as_bytes(std::span(&rule, 1)));
      CHECK(rule.step_size == Approx(1e-3 / (1 - std::pow(beta, number))).epsilon(1e-7));
    }
  }
  CHECK(digest.value() == 0x0b6a97b97d21cb93);
}

TEST_CASE("maximising negates the gradient") {
  for (const Rule& rule :
       {Rule(AdamW{.maximize = true}), Rule(Adam{.maximize = true}), Rule(Sgd{.maximize = true}),
        Rule(SgdMomentum{.maximize = true}), Rule(Lion{.maximize = true}), Rule(Adagrad{.maximize = true})}) {
    CHECK(at(rule, {.number = 1, .gradient_factor = 0.5f}).gradient_factor == -0.5f);
  }
}

TEST_CASE("SGD ignores dampening at the first step, as torch does") {
  const SgdMomentum options{.dampening = 0.25};
  CHECK(std::get<kernels::SgdMomentum>(at(options, {.number = 1}).rule).one_minus_dampening == 1.0f);
  CHECK(std::get<kernels::SgdMomentum>(at(options, {.number = 2}).rule).one_minus_dampening == 0.75f);
}

TEST_CASE("SGD without momentum has the bits of plain SGD, and leaves the momentum alone") {
  constexpr std::size_t count = 1000;
  const auto backend = kernels::cpu_backend({.threads = 1});
  const std::vector<kernels::Run> runs{{0, count, 0}};
  const auto update = [&](kernels::UpdateMemory& memory, const Rule& rule) {
    const std::vector<kernels::GroupStep> steps{at(rule, {.number = 3, .gradient_factor = 0.5f})};
    backend->update(memory.tile(), runs, steps);
  };
  for (const StateFormat format : all_state_formats) {
    kernels::UpdateMemory memory({.format = format, .count = count});
    update(memory, SgdMomentum{.lr = 0.1});
    kernels::UpdateMemory plain = memory;
    update(memory, SgdMomentum{.lr = 0.1, .momentum = 0.0, .dampening = 0.5, .weight_decay = 0.01});
    update(plain, Sgd{.lr = 0.1, .weight_decay = 0.01});
    INFO(name(format));
    const bool is_same = memory.bytes() == plain.bytes();
    CHECK(is_same);
  }
}

TEST_CASE("Adagrad's step size decays with the step") {
  const Adagrad options{.lr = 0.1, .lr_decay = 0.5};
  CHECK(std::get<kernels::Adagrad>(at(options, {.number = 1}).rule).step_size == 0.1f);
  CHECK(std::get<kernels::Adagrad>(at(options, {.number = 3}).rule).step_size == 0.05f);
}

TEST_CASE("invalid options are refused with the rule, the option and the value") {
  CHECK_THROWS_WITH(check(AdamW{.beta2 = 1.0}), Catch::Contains("AdamW with beta2 = 1"));
  CHECK_THROWS_WITH(check(Adam{.lr = -1.0}), Catch::Contains("Adam with lr = -1"));
  CHECK_THROWS_WITH(check(Lion{.weight_decay = std::nan("")}), Catch::Contains("Lion with weight_decay = nan"));
  CHECK_THROWS_WITH(check(AdamW{.lr = INFINITY}), Catch::Contains("AdamW with lr = inf"));
  CHECK_THROWS_WITH(check(Adagrad{.eps = -1e-3}), Catch::Contains("Adagrad with eps"));
  CHECK_THROWS_WITH(check(Sgd{.weight_decay = -1.0}), Catch::Contains("SGD with weight_decay"));
  CHECK_THROWS_WITH(check(SgdMomentum{.momentum = 0.0, .nesterov = true}), Catch::Contains("Nesterov"));
  CHECK_THROWS_WITH(check(AdamW{.amsgrad = true}), Catch::Contains("amsgrad") && Catch::Contains("B1005"));
}

TEST_CASE("torch's defaults are accepted") {
  for (const Rule& rule : {Rule(AdamW{}), Rule(Adam{}), Rule(Sgd{}), Rule(SgdMomentum{}), Rule(Lion{}), Rule(Adagrad{}),
                           Rule(External{})}) {
    CHECK_NOTHROW(check(rule));
  }
}
