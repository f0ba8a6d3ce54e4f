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

// What a suite tells the report about a case.
struct Measurement {
  std::string suite{};
  std::string name{};  // "case" in JSON
  double value = 0;
  std::string unit{};
  std::string against{};          // the subject that it ran in turn with; empty for the limits themselves
  std::optional<double> ratio{};  // how many times faster than `against`: above 1 is better, whatever the unit
  double against_value = 0;
  double spread = 0;  // spread of the ratio, relative to it
};

// Writes a measurement to stdout, as a line of JSON.
void emit(const Measurement& measurement);

// The same, of a case whose rounds ran in turn with those of another subject.
void emit(const std::string& suite, const std::string& name, const std::string& unit, const std::string& against,
          const Summary& summary);

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

// What the cases of CPU suites are made of.
struct Setting {
  const Threads& threads;
  Limits& limits;
  std::size_t elements;  // elements of the large cases, which must not fit the caches
  Copy copy;             // the fastest on this machine, found at the start of the run
};

struct Case {
  std::string name;
  std::string against;
  std::function<Subject(const Setting&)> make;
  std::function<Subject(const Setting&, double work)> make_against;  // `work` is that of the case's subject
  std::string unit = "GB/s";
};

struct Suite {
  std::string name;
  std::string description;
  std::size_t most_bytes_of_an_element;  // moved by one run of any case: sizes the buffers of the limits
  std::vector<Case> cases;
};

// The `main` of a CPU suite. It measures the limits of the memory first, then its cases.
int run_suite(const Suite& suite, int argc, char** argv);

}  // namespace ballast::benchmarks
