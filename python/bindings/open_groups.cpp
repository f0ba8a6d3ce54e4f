#include "python/bindings/open_groups.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace ballast::python {
namespace {

struct OpenGroups {
  std::mutex mutex;
  std::set<OpenGroup*> groups;
};
OpenGroups& open_groups();

void say_goodbye(int exit_code, void*) {
  OpenGroups& open = open_groups();
  const std::lock_guard lock(open.mutex);
  for (OpenGroup* const group : open.groups) {
    if (group->is_of_this_process()) group->communicator().leave(group->farewell_of_process(exit_code));
  }
}

// Returns the groups, which are never freed, because they are used while the process ends.
OpenGroups& open_groups() {
  static auto* const all = [] {
    ::on_exit(say_goodbye, nullptr);  // glibc's, which unlike atexit() tells how the process ends
    return new OpenGroups;
  }();
  return *all;
}

}  // namespace

OpenGroup::OpenGroup() : backend_(kernels::cpu_backend()), process_(::getpid()) {}

bool OpenGroup::is_of_this_process() const { return process_ == ::getpid(); }

void OpenGroup::begin(std::unique_ptr<Communicator> communicator) { communicator_ = std::move(communicator); }

void OpenGroup::count_steps(std::uint64_t steps) {
  steps_ = steps;
  communicator_->set_activity(fmt::format("is in step {}", steps + 1));
}

std::string OpenGroup::after_steps() const {
  const std::uint64_t steps = steps_;
  return steps == no_optimizer ? "" : fmt::format(" after {} step{}", steps, steps == 1 ? "" : "s");
}

std::string OpenGroup::closing_words() const {
  return fmt::format("it closed its {}{}", steps_ == no_optimizer ? "group" : "optimizer", after_steps());
}

LeaveReason OpenGroup::farewell_of_process(int exit_code) const {
  const int code = exit_code & 0xFF;  // other processes see only this byte
  if (code == 0) return {.words = "it ended" + after_steps()};
  return {.words = fmt::format("it ended with exit code {}{}", code, after_steps()), .has_failed = true};
}

void remember(OpenGroup& group) {
  const std::lock_guard lock(open_groups().mutex);
  open_groups().groups.insert(&group);
}

void forget(OpenGroup& group) {
  const std::lock_guard lock(open_groups().mutex);
  open_groups().groups.erase(&group);
}

}  // namespace ballast::python
