// Errors: a few exception types, thrown from one place. A message says what cannot be done and why, where, what is
// needed and available, and what to change.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels/runtime/error_codes.h"

namespace ballast {

// The position of a check in the sources. (std::source_location is missing from clang 14 with GCC's library.)
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// The parts of a message. Only `what` is required; an empty remedy is filled in from the table of codes.
struct Problem {
  std::string what;
  std::string where{};  // parameter, unit, rank, file
  std::string needed{};
  std::string available{};
  std::string remedy{};
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const Problem& problem, Site site);
  Code code() const { return code_; }
  const Problem& problem() const { return problem_; }

 private:
  Code code_;
  Problem problem_;
};

// The caller can correct it: B1….
class UsageError : public Error {
  using Error::Error;
};

// The machine lacks something: B2….
class ResourceError : public Error {
  using Error::Error;
};

// Hardware or a peer failed: B3….
class FailureError : public Error {
  using Error::Error;
};

// Throws the type that belongs to the code.
[[noreturn]] void fail(Code code, const Problem& problem, Site site = Site::here());

// Checked in every build. `problem` is a callable, so that a check that holds builds no strings.
template <class MakeProblem>
void require(bool holds, Code code, MakeProblem&& problem, Site site = Site::here()) {
  if (!holds) [[unlikely]] {
    fail(code, problem(), site);
  }
}

}  // namespace ballast
