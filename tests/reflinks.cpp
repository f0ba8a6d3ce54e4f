// A file system that clones ranges of files, as XFS and btrfs do, for programs that link or preload this: FICLONERANGE copies the
// bytes while `ballast_reflinks` is 1, is refused while it is 0, and is the kernel's else.
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

std::string path_of(long long descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

int copy(int into, const file_clone_range& range) {
  constexpr unsigned long long block = 4096;
  const bool is_aligned =
      range.src_offset % block == 0 && range.src_length % block == 0 && range.dest_offset % block == 0;
  std::vector<char> bytes(range.src_length);
  std::ifstream from(path_of(range.src_fd), std::ios::binary);
  from.seekg(static_cast<std::streamoff>(range.src_offset));
  if (!is_aligned || !from.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    errno = EINVAL;
    return -1;
  }
  std::fstream to(path_of(into), std::ios::in | std::ios::out | std::ios::binary);
  to.seekp(static_cast<std::streamoff>(range.dest_offset));
  to.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush();
  return to ? 0 : -1;
}

}  // namespace

extern "C" {
int ballast_reflinks = -1;
}

extern "C" int ioctl(int descriptor, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == FICLONERANGE && ballast_reflinks == 1)
    return copy(descriptor, *static_cast<const file_clone_range*>(argument));
  if (request == FICLONERANGE && ballast_reflinks == 0) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_ioctl, descriptor, request, argument));
}
