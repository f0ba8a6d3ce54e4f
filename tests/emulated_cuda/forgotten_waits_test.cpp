// Each wait of a stream in a training is left out once: the clocks name the access that it ordered.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/last_words.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr const char* no_more_waits = "the training has fewer waits";

std::string words_without_wait(const Setup& setup, std::size_t number) {
  return emulated::last_words([&] {
    emulated::set_schedule({.lazy = number % 2 == 0, .forgotten_wait = number});
    const auto backend = kernels::cpu_backend({.threads = 1});
    train_rank(setup, *lone_communicator(*backend));
    if (emulated::counts()["cudaStreamWaitEvent"] < number) std::fputs(no_more_waits, stderr);
  });
}

}  // namespace

TEST_CASE("a training without one of its streams' waits breaks a rule, unless other waits give the same order") {
  Setup setup{.placement = placement_of_stage(3, 1), .steps = 2};
  setup.gpu = 0;
  setup.placement.state = {0.4, 0.6, 0.0};
  setup.placement.gradients = {0.5, 0.5, 0.0};
  std::size_t found = 0, waits = 0;
  for (bool is_last = false; !is_last; ++waits) {
    const std::string words = words_without_wait(setup, waits + 1);
    const bool is_named = Contains("rule \"work that shares memory is ordered").match(words);
    found += is_named ? 1u : 0u;
    CHECK((is_named || words == no_more_waits || words.empty()));
    is_last = words == no_more_waits;
  }
  CHECK(waits > 50);
  CHECK(found > waits / 5);
}
