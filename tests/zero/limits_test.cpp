// A training that gets too few threads or descriptors says which limit is reached, wherever this happens.
#include <unistd.h>

#include <catch2/catch.hpp>

#include "tests/limited_child.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

void train_on_a_drive() {
  const TemporaryDirectory directory;
  Setup setup{.placement = placement_of_stage(3, 1), .steps = 2, .keeps_run = true, .directory = directory.path()};
  setup.placement.state = Tier::nvme;
  const auto backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup alone(1, std::chrono::seconds(60));
  train_rank(setup, *thread_communicator(alone, 0, *backend));
}

}  // namespace

TEST_CASE("a training that gets too few threads names the limit that is reached") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  check_every_limit(allow_threads, "RLIMIT_NPROC", train_on_a_drive);
}

TEST_CASE("a training that gets too few descriptors names the limit that is reached") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  check_every_limit(allow_descriptors, "RLIMIT_NOFILE", train_on_a_drive);
}
