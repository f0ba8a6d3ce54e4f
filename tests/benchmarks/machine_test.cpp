#include "benchmarks/harness/machine.h"

#include <catch2/catch.hpp>

using namespace ballast::benchmarks;

TEST_CASE("a machine is named by its processor and the cores that may be used") {
  const auto* cpuinfo = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: A Processor 9000\nstepping\t: 1\n";
  CHECK(machine_name(cpuinfo, 2) == "A Processor 9000, 2 cores");
  CHECK(machine_name("model name : B", 1) == "B, 1 core");
  CHECK(machine_name("processor : 0\nBogoMIPS : 50.00\n", 4) == "unknown processor, 4 cores");
}
