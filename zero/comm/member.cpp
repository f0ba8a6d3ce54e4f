#include "zero/comm/member.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <sstream>

#include "kernels/runtime/system_files.h"
#include "zero/comm/message.h"

namespace ballast {

namespace {

std::string name_of_host() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return host[0] == '\0' ? "?" : host.data();
}

}  // namespace

Member this_process(std::size_t rank, std::size_t size, std::size_t ranks_per_host) {
  return {rank, size, name_of_host(), ::getpid(), this_machine(), ranks_per_host};
}

// Within a PID namespace, process numbers have the same meaning. Where /proc is hidden, hosts differ by name.
std::string this_machine() {
  std::error_code unknown;
  const auto boot = read_text("/proc/sys/kernel/random/boot_id").value_or(name_of_host());
  return boot.substr(0, boot.find('\n')) + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
}

std::string text(const Member& member) {
  return fmt::format("rank {} ({}, pid {})", member.rank, member.host, member.pid);
}

// Between processes of one machine there is no network that could fail instead.
std::string died(const Member& member, const std::string& observer) {
  const bool is_elsewhere = member.machine != observer;
  return text(member) + (is_elsewhere ? " is gone: connection lost: its process ended, or the network to it failed"
                                      : " died: connection lost: its process ended");
}

std::string left(const Member& member, const std::string& words) {
  return fmt::format("{} left: {}", text(member), words);
}

std::string to_line(const Member& member) {
  return fmt::format("{} {} {} {} {} {}", member.rank, member.size, member.pid, member.host, member.machine,
                     member.ranks_per_host);
}

Member member_from(const std::string& line) {
  Member member;
  std::istringstream words(line);
  words >> member.rank >> member.size >> member.pid >> member.host >> member.machine >> member.ranks_per_host;
  if (words.fail() || member.pid <= 0) fail_malformed();
  return member;
}

}  // namespace ballast
