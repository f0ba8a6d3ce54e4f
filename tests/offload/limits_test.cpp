// Tests of the limits of a machine or a container, set for real in a child process.
#include <ballast/error.h>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cerrno>
#include <fstream>
#include <optional>

#include "offload/io_queue.h"
#include "offload/run_directory.h"
#include "tests/limited_child.h"
#include "tests/offload/aligned.h"
#include "tests/offload/store_rig.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;
using namespace ballast::testing;

namespace {

bool has_uring() {
  try {
    uring_queue();
    return true;
  } catch (const ResourceError&) {
    return false;
  }
}

// Refuses one operation of io_uring_register(2), as an older kernel does. The second argument's low half comes first.
void forbid_registering(unsigned operation) {
  static_assert(std::endian::native == std::endian::little);
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(SYS_io_uring_register), 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, operation, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(EINVAL)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  const bool forbidden = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                         ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
  if (!forbidden) throw std::runtime_error("seccomp is not there");
}

constexpr unsigned register_probe = 8;      // IORING_REGISTER_PROBE, since Linux 5.6
constexpr unsigned register_buffers2 = 15;  // IORING_REGISTER_BUFFERS2, since 5.13; sparse tables since 5.19

}  // namespace

TEST_CASE("where io_uring is forbidden, threads do the work, and the log says so once") {
  const std::string output = in_a_child([]() -> std::string {
    forbid(SYS_io_uring_setup, EPERM);
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const Aligned memory(block_bytes);
    for (int time = 0; time < 2; ++time) {
      const auto queue = open_queue({.depth = 2, .log = &log});
      queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
      queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
      lines.append(queue->kind()).append("\n");
    }
    return lines;
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK(output ==
        "no io_uring (Operation not permitted); threads read and write instead, as fast but for more CPU time\n"
        "threads\nthreads\n");
}

TEST_CASE("requesting io_uring where it is forbidden fails with the reason") {
  const std::string output = in_a_child([]() -> std::string {
    forbid(SYS_io_uring_setup, EPERM);
    uring_queue();
    return "made";
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK_THAT(output, Catch::Contains("B2201") && Catch::Contains("Operation not permitted"));
}

TEST_CASE("a ring of a kernel that has no reads and writes for it is not used: threads do the work") {
  if (!has_uring()) return skip("no io_uring here");
  const std::string output = in_a_child([]() -> std::string {
    forbid_registering(register_probe);
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    return std::string(open_queue({.depth = 2, .log = &log})->kind()) + ": " + lines;
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK_THAT(output, Catch::StartsWith("threads: no io_uring (the kernel is older than 5.6"));
}

TEST_CASE("where the kernel has no sparse tables of memory, files are registered, and the log names no limit") {
  if (!has_uring()) return skip("no io_uring here");
  const std::string output = in_a_child([]() -> std::string {
    forbid_registering(register_buffers2);
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const TemporaryDirectory directory;
    std::optional<File> file(std::in_place, directory.path() / "one", FileOptions{.create = true});
    const Aligned memory(block_bytes);
    const auto queue = uring_queue({.depth = 2, .log = &log});
    queue->remember(memory.span());
    queue->remember(*file);
    const int descriptor = file->descriptor();
    const int closed = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(closed, descriptor);  // the ring's table alone still has the file
    queue->submit({IoKind::write, &*file, 0, memory.span()}).wait();
    return lines + "written";
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK(output ==
        "io_uring works without registered memory, for more CPU time: this kernel has no sparse tables of memory\n"
        "written");
}

TEST_CASE("memory that may not be registered is used unregistered, and the log says so once") {
  if (!has_uring()) return skip("no io_uring here");
  if (::geteuid() != 0) return skip("becoming another user needs root");
  const std::string output = in_a_child([]() -> std::string {
    const rlimit low{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_MEMLOCK, &low);
    if (::setuid(65534) != 0) throw std::runtime_error("no other user");
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const Aligned memory(64 << 20);
    const auto queue = uring_queue({.depth = 2, .log = &log});
    for (int time = 0; time < 2; ++time) {
      queue->remember(memory.span());
      queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
      queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
      queue->forget(memory.span());
    }
    return lines + "worked";
  });
  CHECK(output ==
        "io_uring works without registered memory, for more CPU time: Cannot allocate memory for 64 MiB (ulimit -l)\n"
        "worked");
}

TEST_CASE("a queue that gets too few threads names the limit that is reached") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  check_every_limit(allow_threads, "RLIMIT_NPROC", [] { thread_queue({.depth = 4}); });
  if (has_uring()) check_every_limit(allow_threads, "RLIMIT_NPROC", [] { uring_queue({.depth = 4}); });
}

TEST_CASE("queues, directories and stores that get too few descriptors name the limit") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  const TemporaryDirectory directory;
  const auto queue = [] { return thread_queue({.depth = 2}); };
  const RecordShape shape{.run_id = 3, .tiles = 4, .payload_bytes = 1 << 16};
  if (has_uring()) check_every_limit(allow_descriptors, "RLIMIT_NOFILE", [] { uring_queue({.depth = 4}); });
  check_every_limit(allow_descriptors, "RLIMIT_NOFILE", [&] { RunDirectory(directory.path() / "run"); });
  check_every_limit(allow_descriptors, "RLIMIT_NOFILE", [&] {
    const auto own = queue();
    const Drive drives[] = {{directory.path(), own.get()}};
    RecordStore::create(shape, drives);
  });
  check_every_limit(allow_descriptors, "RLIMIT_NOFILE", [&] {
    const auto own = queue();
    const Drive drives[] = {{directory.path(), own.get()}};
    RecordStore::open(shape, drives);
    RecordStore::scratch(shape, drives);
  });
}

TEST_CASE("without descriptors for io_uring, threads do the work, and the limit is named") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  if (!has_uring()) return skip("no io_uring here");
  const std::string output = in_a_child([]() -> std::string {
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const Aligned memory(block_bytes);
    allow_descriptors(1);
    const auto queue = open_queue({.depth = 2, .log = &log});
    queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
    return lines + std::string(queue->kind());
  });
  CHECK_THAT(output, Catch::StartsWith("no io_uring (RLIMIT_NOFILE is ") && Catch::EndsWith("threads"));
}

TEST_CASE("a ring that the kernel no longer accepts is given up, and a thread serves the requests") {
  if (!has_uring()) return skip("no io_uring here");
  const std::string output = in_a_child([]() -> std::string {
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const Aligned memory(16 * block_bytes);
    fill_pattern(memory.span(), 1);
    auto queue = uring_queue({.depth = 4, .log = &log}, {.max_refusals = 3});
    queue->remember(memory.span());
    queue->remember(file);
    queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
    forbid(SYS_io_uring_enter, EPERM);
    queue->submit({IoKind::flush, &file, 0, {}}).wait();
    fill_pattern(memory.span(), 2);
    queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
    if (!holds_pattern(memory.span(), 1)) return "other bytes were read";
    queue->forget(file);
    queue->forget(memory.span());
    queue->remember(memory.span());
    lines.append(queue->kind());
    queue.reset();
    return lines;
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK_THAT(output, Catch::Contains("refused io_uring_enter 3 times in a row (Operation not permitted)") &&
                         !Catch::Contains("without registered memory") && Catch::EndsWith("one thread"));
}

TEST_CASE("a file that the kernel cannot unregister is not taken for another one") {
  if (!has_uring()) return skip("no io_uring here");
  const std::string output = in_a_child([]() -> std::string {
    const TemporaryDirectory directory;
    std::optional<File> file(std::in_place, directory.path() / "one", FileOptions{.create = true});
    const Aligned memory(block_bytes);
    const auto queue = uring_queue({.depth = 2});
    queue->remember(*file);
    forbid(SYS_io_uring_register, EPERM);
    queue->forget(*file);
    file.emplace(directory.path() / "other", FileOptions{.create = true});  // the new file has the same address
    queue->submit({IoKind::write, &*file, 0, memory.span()}).wait();
    return file->bytes() == block_bytes ? "written" : "written to another file";
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK(output == "written");
}

TEST_CASE("a file system without locks is not reported as a directory in use") {
  const std::string output = in_a_child([]() -> std::string {
    const TemporaryDirectory directory;
    forbid(SYS_flock, ENOLCK);  // as NFS answers without its lock service
    const RunDirectory run(directory.path() / "run");
    return "locked";
  });
  if (output.find("seccomp is not there") != std::string::npos) return skip(output);
  CHECK_THAT(output, Catch::StartsWith("B2205 cannot lock the directory: No locks available"));
}
