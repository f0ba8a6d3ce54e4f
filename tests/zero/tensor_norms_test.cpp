// Tests of the norms of single tensors.
#include <catch2/catch.hpp>

#include "tests/zero/counting_communicator.h"
#include "tests/zero/trainee.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("the norms of all tensors need one exchange, however many tensors there are") {
  for (const int stage : {0, 1, 2, 3}) {
    INFO("stage " << stage);
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      CountingCommunicator counting(world);
      Trainee trainee(counting, {.stage = stage, .tile_elements = 256});
      for (std::size_t step = 0; step < 2; ++step) {
        trainee.trainer.run(trainee.training, step);
        trainee.training.finish();
        const std::size_t before = counting.agreements();
        const auto norms = TrainingState(trainee.training).tensor_norms();
        const std::size_t exchanges = counting.agreements() - before;
        if (exchanges != 1) throw std::runtime_error(std::to_string(exchanges) + " exchanges");
        if (norms.size() != trainee.training.model().units.size()) throw std::runtime_error("norms are missing");
        trainee.training.step();
      }
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("a step after the norms of tensors has the bits of a step without them") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  for (const Spread& gradients : {Spread{1.0, 0.0, 0.0}, Spread{0.5, 0.5, 0.0}}) {
    const TrainingOptions options{.stage = 2, .gradients = gradients, .tile_elements = 256, .max_norm = 0.05};
    Trainee plain(*world, options), asked(*world, options);
    for (std::size_t step = 0; step < 3; ++step) {
      plain.trainer.run(plain.training, step);
      asked.trainer.run(asked.training, step);
      const auto norms = TrainingState(asked.training).tensor_norms();
      CHECK(TrainingState(asked.training).tensor_norms() == norms);
      CHECK(asked.training.step().norm == plain.training.step().norm);
    }
    CHECK(asked.parameters() == plain.parameters());
  }
}

TEST_CASE("a step uses the gradients and the norm that a visitor has changed") {
  for (const int stage : {0, 2, 3}) {
    for (const Spread& gradients : {Spread{1.0, 0.0, 0.0}, Spread{0.5, 0.5, 0.0}, Spread{0.0, 1.0, 0.0}}) {
      INFO("stage " << stage);
      const auto failures = failures_of_ranks(2, [&](Communicator& world) {
        const TrainingOptions options{.stage = stage, .gradients = gradients, .tile_elements = 256};
        Trainee plain(world, options), changed(world, options);
        for (std::size_t step = 0; step < 3; ++step) {
          plain.trainer.run(plain.training, step);
          changed.trainer.run(changed.training, step);
          TrainingState(changed.training).visit_gradients([](std::size_t, std::size_t, const View& part, bool) {
            auto* const values = reinterpret_cast<float*>(part.data());
            for (std::size_t i = 0; i < part.count(); ++i)
              values[i] *= 0.25f;
          });
          const double norm = changed.training.gradient_norm();
          if (norm != plain.training.gradient_norm() / 4) throw std::runtime_error("the norm is of other gradients");
          if (changed.training.step(0.25).norm != plain.training.step().norm) throw std::runtime_error("norms differ");
        }
        if (changed.parameters() != plain.parameters()) throw std::runtime_error("parameters differ");
      });
      CHECK(failures == std::vector<std::string>(2));
    }
  }
}
