// The frame of a suite program: it reads options, measures cases one after another, and writes a line of JSON for each.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/harness/limits.h"
#include "benchmarks/harness/measure.h"

namespace ballast::benchmarks {

struct Setting {
  const Threads& threads;
  Limits& limits;
  std::size_t elements;  // of the large cases, which must not fit the caches
  Copy copy;             // the fastest on this machine, found at the start of the run
};

struct Case {
  std::string name;
  std::string against;
  std::function<Subject(const Setting&)> make;  // called when its turn comes: only one case holds memory at a time
  std::function<Subject(const Setting&, double work)> make_against;  // `work` is that of the case's subject
  std::string unit = "GB/s";
};

struct Suite {
  std::string name;
  std::string description;
  std::size_t most_bytes_of_an_element;  // moved by one run of any case: sizes the buffers of the limits
  std::vector<Case> cases;
};

// The `main` of a suite. It reads options from argv and writes measurements as lines of JSON to stdout, and everything
// else to stderr. Returns the exit code: 0, or 2 for wrong arguments and errors.
int run_suite(const Suite& suite, int argc, char** argv);

}  // namespace ballast::benchmarks
