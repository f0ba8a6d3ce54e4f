// Errors: a few exception types, each with a stable code. A message says what cannot be done and why, where, what is
// needed and available, and what to change.
#pragma once

#include <stdexcept>
#include <string>

namespace ballast {

// docs/reference/errors.md describes each code. The first digit is the cause: 1 the call, 2 the machine, 3 a failure of
// a peer or of hardware.
enum class Code : int {
  bad_argument = 1001,
  wrong_dtype = 1002,
  wrong_size = 1003,
  unaligned = 1004,
  unsupported = 1005,
  bad_environment = 1006,
  out_of_order = 1007,
  newer_format = 1008,
  run_mismatch = 1009,
  older_format = 1010,
  internal = 1999,
  host_memory = 2001,
  pinned_memory = 2002,
  device_memory = 2003,
  memory_budget = 2004,
  no_cuda_build = 2101,
  no_cuda_device = 2102,
  no_cublas = 2103,
  no_io_uring = 2201,
  drive_full = 2202,
  network_drive = 2203,
  directory_in_use = 2204,
  no_file_locks = 2205,
  foreign_file = 2206,
  no_transport = 2301,
  system_limit = 2401,
  wrong_bits = 3001,
  cuda_call = 3101,
  file_call = 3201,
  bad_record = 3202,
  peer_failed = 3301,
  peer_late = 3302,
  no_meeting = 3303,
};

std::string label(Code code);  // "B1001"

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
