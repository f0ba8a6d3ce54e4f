#include "zero/comm/shared_memory.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "kernels/runtime/system_limits.h"
#include "zero/comm/member.h"

namespace ballast {
namespace {

std::string reason() { return std::generic_category().message(errno); }

// Allocates in parts and repeats each: a signal ends the call and undoes its work.
bool take_pages(int file, std::size_t bytes) {
  constexpr std::size_t part = std::size_t{16} << 20;
  for (std::size_t begin = 0; begin < bytes; begin += part) {
    const auto count = static_cast<off_t>(std::min(part, bytes - begin));
    while (::fallocate(file, 0, static_cast<off_t>(begin), count) != 0) {
      if (errno != EINTR) return false;
    }
  }
  return true;
}

// Returns null on failure.
HostPages map(int file, std::size_t bytes, int protection, int flags) {
  void* const memory = ::mmap(nullptr, bytes, protection, MAP_SHARED | flags, file, 0);
  return HostPages(memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory), Unmap{bytes});
}

}  // namespace

SharedMemory::SharedMemory(pid_t maker, Descriptor file, HostPages memory)
    : maker_(maker), file_(std::move(file)), memory_(std::move(memory)) {}

SharedMemory SharedMemory::make(std::size_t bytes, const std::string& owner) {
  Descriptor file(::memfd_create("ballast", MFD_CLOEXEC));
  if (!file && is_descriptor_limit(errno)) fail_limit("cannot make shared memory", errno);
  HostPages memory;
  if (file && take_pages(file.get(), bytes)) memory = map(file.get(), bytes, PROT_READ | PROT_WRITE, MAP_POPULATE);
  require(memory != nullptr, Code::host_memory, [&] {
    return Problem{.what = "cannot get shared memory",
                   .where = owner,
                   .needed = fmt::format("{} bytes", bytes),
                   .available = reason()};
  });
  return {::getpid(), std::move(file), std::move(memory)};
}

void SharedMemory::empty() { ::madvise(data(), bytes(), MADV_REMOVE); }

std::string SharedMemory::invitation() const { return fmt::format("{} {} {}", this_machine(), maker_, file_.get()); }

SharedMemory SharedMemory::open(const std::string& invitation) {
  std::istringstream words(invitation);
  std::string names;
  pid_t pid = 0;
  int descriptor = -1;
  words >> names >> pid >> descriptor;
  require(names == this_machine(), Code::no_transport,
          [] { return Problem{.what = "not all ranks are on one machine, or they are in containers of their own"}; });
  return open(pid, descriptor, PROT_READ | PROT_WRITE);
}

SharedMemory SharedMemory::open_file_of_same_process(int file) const { return open(maker_, file, PROT_READ); }

SharedMemory SharedMemory::open(pid_t maker, int file, int protection) {
  const int access = (protection & PROT_WRITE) != 0 ? O_RDWR : O_RDONLY;
  Descriptor opened(::open(fmt::format("/proc/{}/fd/{}", maker, file).c_str(), access | O_CLOEXEC));
  if (!opened && is_descriptor_limit(errno)) fail_limit("cannot open the shared memory of another rank", errno);
  struct stat status {};
  HostPages memory;
  if (opened && ::fstat(opened.get(), &status) == 0) {
    memory = map(opened.get(), static_cast<std::size_t>(status.st_size), protection, 0);
  }
  require(memory != nullptr, Code::no_transport, [&] {
    return Problem{.what = fmt::format("cannot share the memory of process {}", maker), .available = reason()};
  });
  return {maker, Descriptor(), std::move(memory)};
}

}  // namespace ballast
