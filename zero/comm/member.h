// The identity of a process in its job.
#pragma once

#include <sys/types.h>

#include <string>

namespace ballast {

struct Member {
  std::size_t rank = 0;
  std::size_t size = 1;  // of the job, as this process's environment says
  std::string host{};
  pid_t pid = 0;
  std::string machine{};           // the same for processes that can share memory, and for no others
  std::size_t ranks_per_host = 0;  // in the order of sums: JobOptions::ranks_per_host
};

Member this_process(std::size_t rank, std::size_t size, std::size_t ranks_per_host = 0);
std::string this_machine();

std::string text(const Member& member);                               // "rank 2 (node7, pid 4711)"
std::string died(const Member& member, const std::string& observer);  // the machine that has lost the connection
std::string left(const Member& member, const std::string& words);
std::string to_line(const Member& member);    // member_from() reads it
Member member_from(const std::string& line);  // throws B3303 for other text

}  // namespace ballast
