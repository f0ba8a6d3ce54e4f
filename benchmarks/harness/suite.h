// The frame of a suite program: it reads options, measures cases one after another, and writes a line of JSON for each.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/harness/limits.h"
#include "benchmarks/harness/measure.h"

namespace CLI {
class App;
}

namespace ballast::benchmarks {

// Writes a line of JSON to stdout: what a suite tells the report about a case. `against` names the subject whose rounds
// alternated with those of the case. It is empty for a limit.
void emit(const std::string& suite, const std::string& name, const std::string& unit, const Rates& rates,
          const std::string& against = "", const Rates& against_rates = {});

// A case, and the subject that it runs in turn with. They are made when their turn comes: only one case holds memory at a time.
struct Pair {
  Subject subject;
  Subject against;
};
struct Trial {
  std::string name;
  std::string against;
  std::function<Pair()> make;
  std::string unit = "GB/s";
};

struct Choice {
  Rounds rounds{};
  std::string only{};  // a text in the line of the chosen cases
  bool list = false;   // names the cases, and measures nothing
};
void describe(CLI::App& app, Choice& choice);

// Measures the chosen trials, or names them. Throws UsageError if none is chosen.
void run_trials(const std::string& suite, const std::vector<Trial>& trials, const Choice& choice);

// The common end of every main(). Parses the arguments, calls `run`, and prints errors to stderr. Returns the exit code: 0, or 2
// for wrong arguments and errors.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run);

// What the trials of CPU suites are made of. Threads and limits are there when a trial is made.
struct Setting {
  std::size_t elements = 0;  // elements of the large cases, which must not fit the caches
  std::optional<Threads> threads{};
  std::optional<Limits> limits{};
  Copy copy{};  // the fastest on this machine, found at the start of the run
};

struct Suite {
  std::string name;
  std::string description;
  std::size_t most_bytes_of_an_element;  // moved by one run of any case: sizes the buffers of the limits
  std::function<std::vector<Trial>(const Setting&)> trials;  // they keep the reference
};

// The `main` of a CPU suite. It measures the limits of the memory first, then its cases.
int run_suite(const Suite& suite, int argc, char** argv);

}  // namespace ballast::benchmarks
