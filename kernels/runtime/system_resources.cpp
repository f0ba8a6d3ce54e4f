#include "kernels/runtime/system_resources.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <sys/resource.h>

#include <cerrno>
#include <mutex>
#include <set>
#include <system_error>
#include <vector>

#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/system_files.h"

namespace ballast {

namespace {

struct Kept {
  std::mutex mutex;
  std::set<int> descriptors;
};
Kept& kept();

// Runs in the child. It calls no function that needs a lock which another thread of the parent may have held. The
// numbers stay in use, because their owners in the child will close them.
void let_go() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int descriptor : kept().descriptors) {
    ::dup3(nothing, descriptor, O_CLOEXEC);
  }
  ::close(nothing);
  kept().mutex.unlock();
}

// Never freed: a process may fork until it ends.
Kept& kept() {
  static auto* const all = [] {
    ::pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, let_go);
    return new Kept;
  }();
  return *all;
}

std::string limit(decltype(RLIMIT_NPROC) resource) {
  rlimit found{};
  if (getrlimit(resource, &found) != 0) return "unknown";
  return found.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{}", found.rlim_cur);
}

// Returns nothing if no descriptor is left to read with: the error that lists the limits must still be thrown.
template <class Read>
auto if_readable(const Read& read) -> decltype(read()) {
  try {
    return read();
  } catch (const Error&) {
    return {};
  }
}

std::string thread_limits(const std::filesystem::path& root) {
  std::vector<std::string> limits{fmt::format("RLIMIT_NPROC is {} (`ulimit -u`)", limit(RLIMIT_NPROC))};
  if (const auto tasks = if_readable([&] { return cgroup_tasks(root); })) {
    limits.push_back(fmt::format("pids.max is {}, {} in use ({})", tasks->limit, tasks->used, tasks->file.string()));
  }
  if (const auto most = if_readable([&] { return read_number(root / "proc/sys/kernel/threads-max"); })) {
    limits.push_back(fmt::format("kernel.threads-max is {}", *most));
  }
  if (const auto space = limit(RLIMIT_AS); space != "unlimited") {
    limits.push_back(fmt::format("RLIMIT_AS is {} bytes (`ulimit -v`)", space));
  }
  const auto threads =
      if_readable([&] { return number_after(read_text(root / "proc/self/status").value_or(""), "Threads:"); });
  if (threads) limits.push_back(fmt::format("this process has {} threads", *threads));
  return fmt::format("{}", fmt::join(limits, "; "));
}

}  // namespace

NotInChildren::NotInChildren(int descriptor) : descriptor_(descriptor) {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.insert(descriptor);
}

NotInChildren::~NotInChildren() {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.erase(descriptor_);
}

bool is_descriptor_limit(int error) { return error == EMFILE || error == ENFILE; }

std::string limits_behind(int error, const std::filesystem::path& root) {
  if (error == EMFILE) return fmt::format("RLIMIT_NOFILE is {} (`ulimit -n`)", limit(RLIMIT_NOFILE));
  if (error == EFBIG) return fmt::format("RLIMIT_FSIZE is {} bytes (`ulimit -f`)", limit(RLIMIT_FSIZE));
  if (error == ENFILE) return "all of fs.file-max, the system's limit, is in use";
  return error == EAGAIN ? thread_limits(root) : "";
}

void fail_limit(std::string_view what, int error) {
  fail(Code::system_limit, {.what = fmt::format("{}: {}", what, std::generic_category().message(error)),
                            .available = limits_behind(error)});
}

Descriptor require_descriptor(int answer, std::string_view what) {
  if (answer < 0) fail_limit(what, errno);
  return Descriptor(answer);
}

std::thread start_thread(std::string_view purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& refused) {
    fail_limit(fmt::format("cannot start a thread for {}", purpose), refused.code().value());
  }
}

}  // namespace ballast
