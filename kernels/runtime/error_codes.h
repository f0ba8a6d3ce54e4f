// All errors of Ballast, with their stable codes. ERRORS.md is generated from the table.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ballast {

// The first digit is the cause: 1 the call, 2 the machine, 3 a failure of a peer or of hardware.
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
  no_io_uring = 2201,
  drive_full = 2202,
  network_drive = 2203,
  directory_in_use = 2204,
  no_file_locks = 2205,
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

struct CodeInfo {
  Code code;
  std::string_view name;
  std::string_view meaning;
  std::string_view remedy;
};

std::span<const CodeInfo> all_codes();  // in numeric order
const CodeInfo& describe(Code code);
std::string label(Code code);     // "B1001"
std::string codes_as_markdown();  // the content of ERRORS.md

}  // namespace ballast
