#include "benchmarks/harness/suite.h"
#include "benchmarks/kernels/cases.h"

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite(ballast::benchmarks::kernels_suite(), argc, argv);
}
