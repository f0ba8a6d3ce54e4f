#include "zero/comm/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "kernels/runtime/error.h"
#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

std::string reason() { return std::generic_category().message(errno); }

// Process numbers mean the same within it.
std::string namespace_of_this_process() {
  std::error_code unknown;
  const auto boot = read_text("/proc/sys/kernel/random/boot_id").value_or("?");
  return boot.substr(0, boot.find('\n')) + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
}

}  // namespace

SharedMemory::SharedMemory(pid_t maker, Descriptor file, std::size_t bytes, Resident resident)
    : maker_(maker), file_(std::move(file)) {
  const int flags = MAP_SHARED | (resident == Resident::at_once ? MAP_POPULATE : 0);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
  require(memory != MAP_FAILED, Code::no_transport,
          [] { return Problem{.what = "shared memory could not be mapped", .available = reason()}; });
  memory_ = HostPages(static_cast<std::byte*>(memory), Unmap{bytes});
}

SharedMemory SharedMemory::make(std::size_t bytes, const std::string& owner) {
  Descriptor file(::memfd_create("ballast", MFD_CLOEXEC));
  require(file && ::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes)) == 0, Code::host_memory, [&] {
    return Problem{.what = "no shared memory could be had",
                   .where = owner,
                   .needed = fmt::format("{} bytes", bytes),
                   .available = reason()};
  });
  return {::getpid(), std::move(file), bytes, Resident::at_once};
}

std::string SharedMemory::invitation() const {
  return fmt::format("{} {} {}", namespace_of_this_process(), maker_, file_.get());
}

SharedMemory SharedMemory::open(const std::string& invitation) {
  std::istringstream words(invitation);
  std::string names;
  pid_t pid = 0;
  int descriptor = -1;
  words >> names >> pid >> descriptor;
  require(names == namespace_of_this_process(), Code::no_transport,
          [] { return Problem{.what = "not all ranks are on one machine, or they are in containers of their own"}; });
  return open(pid, descriptor);
}

SharedMemory SharedMemory::open_beside(int file) const { return open(maker_, file); }

SharedMemory SharedMemory::open(pid_t maker, int file) {
  Descriptor opened(::open(fmt::format("/proc/{}/fd/{}", maker, file).c_str(), O_RDWR | O_CLOEXEC));
  struct stat status {};
  require(opened && ::fstat(opened.get(), &status) == 0, Code::no_transport, [&] {
    return Problem{.what = fmt::format("the memory of process {} cannot be shared", maker), .available = reason()};
  });
  SharedMemory memory(maker, std::move(opened), static_cast<std::size_t>(status.st_size), Resident::when_written);
  memory.close_door();
  return memory;
}

}  // namespace ballast
