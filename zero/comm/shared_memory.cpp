#include "zero/comm/shared_memory.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <sstream>
#include <system_error>

#include "kernels/runtime/device.h"
#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/sizes.h"
#include "zero/comm/message.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3, and later headers
#endif

namespace ballast {
namespace {

std::string reason() { return std::generic_category().message(errno); }

// Some systems forbid memory that can be executed (vm.memfd_noexec=2), and older ones do not know the flag.
Descriptor make_file() {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor file(::memfd_create("ballast", flags | MFD_NOEXEC_SEAL));
  return file || errno != EINVAL ? std::move(file) : Descriptor(::memfd_create("ballast", flags));
}

// Allocates in parts and repeats each: a signal ends the call and undoes its work. Returns 0, or the error.
int take_pages(int file, std::size_t bytes) {
  constexpr std::size_t part = std::size_t{16} << 20;
  for (std::size_t begin = 0; begin < bytes; begin += part) {
    const auto count = static_cast<off_t>(std::min(part, bytes - begin));
    while (::fallocate(file, 0, static_cast<off_t>(begin), count) != 0) {
      if (errno != EINTR) return errno;
    }
  }
  return 0;
}

// Whether the kernel, or a filter of system calls, does not allocate pages of files.
bool is_unavailable(int error) { return error == EOPNOTSUPP || error == ENOSYS || error == EPERM; }

// The kernel would end a process that is no Python with SIGXFSZ.
void require_file_size(std::size_t bytes) {
  rlimit limit{};
  const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur;
  if (is_limited) fail_limit(fmt::format("cannot make shared memory of {}", human_bytes(bytes)), EFBIG);
}

// The size of sealed memory stays: a process that maps it never finds that pages are gone.
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Files that are no memory have no seals. The kernel may add others to ours: F_SEAL_EXEC, with vm.memfd_noexec.
bool has_all_seals(int file) {
  const int present = ::fcntl(file, F_GET_SEALS);
  return present != -1 && (present & seals) == seals;
}

// Returns why this is no memory that a rank has made for others; empty if it is.
std::string reason_against(int file, std::size_t bytes) {
  struct stat status {};
  if (::fstat(file, &status) != 0) return reason();
  if (status.st_uid != ::geteuid()) return fmt::format("it belongs to user {}", status.st_uid);
  if (!has_all_seals(file)) return "it is no shared memory of Ballast";
  const auto size = static_cast<std::size_t>(status.st_size);
  return size < bytes ? fmt::format("it has {} bytes instead of {}", size, bytes) : "";
}

// What an invitation says.
struct Place {
  std::string machine{};
  pid_t maker = 0;
  int file = -1;
};

Place place_of(const std::string& invitation) {
  Place place;
  std::istringstream(invitation) >> place.machine >> place.maker >> place.file;
  return place;
}

std::string path_of(pid_t maker, int file) { return fmt::format("/proc/{}/fd/{}", maker, file); }

// Returns null on failure.
HostPages map(int file, std::size_t bytes, int protection, int flags) {
  void* const memory = ::mmap(nullptr, bytes, protection, MAP_SHARED | flags, file, 0);
  return HostPages(memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory), Unmap{bytes});
}

}  // namespace

SharedMemory::SharedMemory(pid_t maker, Descriptor file, HostPages memory)
    : maker_(maker), file_(std::move(file)), memory_(std::move(memory)) {}

SharedMemory SharedMemory::make(std::size_t bytes, const std::string& owner) {
  Descriptor file = make_file();
  if (!file && is_descriptor_limit(errno)) fail_limit("cannot make shared memory", errno);
  require_file_size(bytes);
  HostPages memory;
  int error = file ? take_pages(file.get(), bytes) : errno;
  const bool is_allocated = error == 0;
  if (is_unavailable(error)) error = ::ftruncate(file.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0 && ::fcntl(file.get(), F_ADD_SEALS, seals) != 0) error = errno;
  if (error == 0) {
    memory = map(file.get(), bytes, PROT_READ | PROT_WRITE, is_allocated ? MAP_POPULATE : 0);
    if (memory == nullptr) error = errno;
  }
  if (error == 0 && !is_allocated) error = populate({memory.get(), bytes}, 1);
  require(error == 0, Code::host_memory, [&] {
    return Problem{.what = fmt::format("cannot get shared memory: {}", std::generic_category().message(error)),
                   .where = owner,
                   .needed = human_bytes(bytes)};
  });
  return {::getpid(), std::move(file), std::move(memory)};
}

void SharedMemory::empty() { ::madvise(data(), bytes(), MADV_REMOVE); }

std::string SharedMemory::invitation() const { return fmt::format("{} {} {}", this_machine(), maker_, file_.get()); }

SharedMemory SharedMemory::open(const std::string& invitation, std::size_t bytes) {
  const Place place = place_of(invitation);
  require(place.machine == this_machine(), Code::no_transport,
          [] { return Problem{.what = "not all ranks are on one machine, or they are in containers of their own"}; });
  return open(place.maker, place.file, bytes, PROT_READ | PROT_WRITE);
}

bool SharedMemory::is_gone(const std::string& invitation) {
  const Place place = place_of(invitation);
  const bool is_visible = place.machine == this_machine() && ::access("/proc/self", F_OK) == 0;
  return is_visible && ::access(path_of(place.maker, place.file).c_str(), F_OK) != 0 && errno == ENOENT;
}

SharedMemory SharedMemory::open_file_of_same_process(int file, std::size_t bytes) const {
  return open(maker_, file, bytes, PROT_READ);
}

SharedMemory SharedMemory::open(pid_t maker, int file, std::size_t bytes, int protection) {
  const int access = (protection & PROT_WRITE) != 0 ? O_RDWR : O_RDONLY;
  Descriptor opened(::open(path_of(maker, file).c_str(), access | O_CLOEXEC));
  if (!opened && is_descriptor_limit(errno)) fail_limit("cannot open the shared memory of another rank", errno);
  std::string problem = opened ? reason_against(opened.get(), bytes) : reason();
  HostPages memory;
  if (problem.empty()) {
    struct stat status {};
    ::fstat(opened.get(), &status);
    memory = map(opened.get(), static_cast<std::size_t>(status.st_size), protection, 0);
    if (memory == nullptr) problem = reason();
  }
  require(memory != nullptr, Code::no_transport, [&] {
    return Problem{.what = fmt::format("cannot share the memory of process {}", maker), .available = problem};
  });
  return {maker, Descriptor(), std::move(memory)};
}

std::byte* SharedPages::allocate(std::size_t bytes) {
  const std::string owner = "shared memory of ranks";
  require_host_memory(bytes, owner, read_host_limits());
  SharedMemory memory = SharedMemory::make(bytes, owner);
  std::byte* const data = memory.data();
  const std::lock_guard lock(mutex_);
  memories_.emplace(data, std::move(memory));
  return data;
}

void SharedPages::release(std::byte* memory, std::size_t) noexcept {
  const std::lock_guard lock(mutex_);
  const auto released = memories_.find(memory);
  released->second.empty();  // peers still have it mapped
  memories_.erase(released);
  ++releases_;
}

std::optional<SharedLocation> SharedPages::find(std::span<const std::byte> bytes) const {
  const std::lock_guard lock(mutex_);
  auto after = memories_.upper_bound(bytes.data());
  if (bytes.empty() || after == memories_.begin()) return std::nullopt;
  const SharedMemory& memory = std::prev(after)->second;
  const auto begin = static_cast<std::size_t>(bytes.data() - memory.data());
  if (begin + bytes.size() > memory.bytes()) return std::nullopt;
  return SharedLocation{memory.file(), releases_, begin};
}

const std::byte* PeerPages::at(const SharedLocation& location, std::size_t bytes, const SharedMemory& any_memory) {
  if (location.releases != releases_) forget();
  releases_ = location.releases;
  auto memory = memories_.find(location.file);
  const bool is_new = memory == memories_.end();
  if (is_new) {
    memory = memories_.emplace(location.file, any_memory.open_file_of_same_process(location.file, bytes)).first;
  }
  const std::size_t available = memory->second.bytes();
  require(location.begin <= available && bytes <= available - location.begin, Code::no_transport, [&] {
    return Problem{.what = "cannot read the memory of another rank: its announcement names bytes beyond the end"};
  });
  if (is_new && gpu_) pin(memory->second, location.begin, bytes);
  return memory->second.data() + location.begin;
}

void PeerPages::pin(const SharedMemory& memory, std::size_t begin, std::size_t bytes) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t first = begin - begin % page_bytes;
  const std::size_t end = std::min(round_up(begin + bytes, page_bytes), memory.bytes());
  std::byte* const pages = memory.data() + first;
  const bool is_pinned = device::pin(pages, end - first, *gpu_, device::Access::read).empty();
  if (is_pinned) pinned_.push_back(pages);  // otherwise copies are slower
}

void PeerPages::forget() {
  for (std::byte* const pages : pinned_)
    device::unpin(pages, *gpu_);
  pinned_.clear();
  memories_.clear();
}

}  // namespace ballast
