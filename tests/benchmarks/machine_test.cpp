#include "benchmarks/harness/machine.h"

#include <catch2/catch.hpp>

using namespace ballast;
using namespace ballast::benchmarks;

TEST_CASE("a machine is named by its processor and the cores that may be used") {
  ThisMachine machine;
  CHECK(machine_name(machine) == "unknown processor, 1 core");
  machine.cpu = "A Processor 9000";
  machine.cores = 2;
  CHECK(machine_name(machine) == "A Processor 9000, 2 cores");
}
