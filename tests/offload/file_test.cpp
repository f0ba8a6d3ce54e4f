#include <ballast/error.h>

#include "offload/file.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <optional>
#include <sstream>

#include "offload/run_directory.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;

TEST_CASE("a new file is private to its user, and an existing one is not touched") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "file";
  const File file(path, {.create = true});
  struct stat found {};
  REQUIRE(::stat(path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0600);
  CHECK_THROWS_WITH(File(path, {.create = true}), Catch::Contains("B3201") && Catch::Contains(path.string()));
  CHECK_THROWS_WITH(File(directory.path() / "other"), Catch::Contains("No such file") && !Catch::Contains("byte"));
}

TEST_CASE("a file without a name leaves nothing") {
  const TemporaryDirectory directory;
  const File file = File::nameless(directory.path());
  CHECK(file.descriptor() >= 0);
  CHECK(std::filesystem::is_empty(directory.path()));
  CHECK_THROWS_WITH(File::nameless(directory.path() / "missing"), Catch::Contains("B3201"));
}

TEST_CASE("a buffered file states why it is buffered") {
  const TemporaryDirectory directory;
  const File file(directory.path() / "file", {.create = true, .direct = false});
  CHECK_FALSE(file.direct());
  CHECK(file.buffered_because() == "it is requested");
}

TEST_CASE("a file whose drive needs larger blocks is buffered, and says why") {
  int tried = 0;
  const auto answers = [&](int error) {
    return [&tried, error] {
      ++tried;
      return error;
    };
  };
  CHECK(direct_io_obstacle(DirectIoUnits{512, 512}, answers(EINVAL)).empty());
  CHECK(direct_io_obstacle(DirectIoUnits{4096, 4}, answers(EINVAL)).empty());
  CHECK_THAT(direct_io_obstacle(DirectIoUnits{0, 0}, answers(0)), Catch::Contains("no direct I/O on this file"));
  CHECK_THAT(direct_io_obstacle(DirectIoUnits{16384, 512}, answers(0)), Catch::Contains("blocks of 16384 bytes"));
  CHECK_THAT(direct_io_obstacle(DirectIoUnits{512, 65536}, answers(0)), Catch::Contains("a multiple of 65536 bytes"));
  CHECK(tried == 0);
  CHECK_THAT(direct_io_obstacle({}, answers(EINVAL)), Catch::Contains("refuses direct I/O in blocks of 4096 bytes"));
  CHECK(direct_io_obstacle({}, answers(0)).empty());
  CHECK(direct_io_obstacle({}, answers(EIO)).empty());  // comes back where the file is used
  CHECK(tried == 3);
}

TEST_CASE("a new file is empty after direct I/O has begun") {
  const TemporaryDirectory directory;
  CHECK(File(directory.path() / "file", {.create = true}).bytes() == 0);
  CHECK(File::nameless(directory.path()).bytes() == 0);
}

TEST_CASE("a file system without direct I/O is detected") { CHECK_FALSE(File("/proc/self/coredump_filter").direct()); }

TEST_CASE("network file systems are recognized by their type numbers, and refused") {
  CHECK(file_system_of("/proc").name.starts_with("file system 0x"));
  for (const std::uint32_t local : {0xef53u, 0x58465342u, 0x01021994u, 0x794c7630u, 0x12345u}) {
    CHECK_FALSE(file_system(local).network);
    CHECK_NOTHROW(require_local(file_system(local), "/scratch"));
  }
  for (const std::uint32_t network :
       {0x6969u, 0xff534d42u, 0xfe534d42u, 0x01021997u, 0x00c36400u, 0x0bd00bd0u, 0x6b414653u, 0x19830326u, 0xaad7aaeau,
        0xbacbacbcu, 0x01161970u, 0x7461636fu, 0x65735546u}) {
    CHECK_THROWS_WITH(require_local(file_system(network), "/scratch"),
                      Catch::Contains("B2203") && Catch::Contains("/scratch") &&
                          Catch::Contains("(" + file_system(network).name + ")"));
  }
}

TEST_CASE("a file system of FUSE is local only if it lies on a block device, as the type of its mount says") {
  const std::string mounts =
      "22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw\n"
      "40 22 0:41 / /sshfs rw,nosuid shared:2 master:3 - fuse.sshfs ada@host:/ rw,user_id=0\n"
      "41 22 0:42 / /ntfs rw - fuseblk /dev/sdb1 rw\n"
      "42 22 0:43 / /virtiofs rw - virtiofs scratch rw\n"
      "43 22 0:44 / /plain\\040-\\040fuse rw - fuse source rw\n"
      "44 22 0:4 / /other rw - fuseblk source rw\n";
  const auto found = [&](unsigned minor) {
    std::istringstream lines(mounts);
    return fuse_file_system(lines, makedev(0, minor));
  };
  CHECK(found(41).name == "fuse.sshfs");
  CHECK(found(41).network);
  CHECK(found(42).name == "fuseblk");
  CHECK_FALSE(found(42).network);
  CHECK(found(43).name == "virtiofs");
  CHECK(found(43).network);
  CHECK(found(44).name == "fuse");
  CHECK(found(44).network);
  CHECK(found(99).name == "fuse");  // its mount is not listed
  CHECK(found(99).network);
}

TEST_CASE("a run's directory is locked by one process, which is named to others, until that process ends") {
  const TemporaryDirectory base;
  const auto path = base.path() / "runs" / "seven";
  int held[2];
  REQUIRE(::pipe(held) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunDirectory mine(path);
    if (::write(held[1], "!", 1) == 1) ::pause();
    ::_exit(1);
  }
  char byte = 0;
  REQUIRE(::read(held[0], &byte, 1) == 1);
  ::close(held[0]);
  ::close(held[1]);
  CHECK_THROWS_WITH(RunDirectory(path), Catch::Contains("B2204") && Catch::Contains(path.string()) &&
                                            Catch::Contains("process " + std::to_string(child) + " on "));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const RunDirectory ours(path);
  CHECK_THROWS_WITH(RunDirectory(path), Catch::Contains("process " + std::to_string(::getpid())));
  struct stat found {};
  REQUIRE(::stat(path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0700);
}

TEST_CASE("the directory of a killed process is free although its forked child lives") {
  const TemporaryDirectory base;
  int ends[2];
  int life[2];  // the child lives until this test closes it
  REQUIRE(::pipe(ends) == 0);
  REQUIRE(::pipe(life) == 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const DirectoryLock mine(base.path());
    if (::fork() == 0) {
      ::close(life[1]);
      char byte = 0;
      if (::write(ends[1], "!", 1) == 1 && ::read(life[0], &byte, 1) == 0) ::_exit(0);
      ::_exit(1);
    }
    ::pause();
  }
  char byte = 0;
  REQUIRE(::read(ends[0], &byte, 1) == 1);
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  CHECK_NOTHROW(DirectoryLock(base.path()));
  for (const int end : {ends[0], ends[1], life[0], life[1]})
    ::close(end);
}

TEST_CASE("a forked child neither keeps nor releases its parent's directory lock") {
  const TemporaryDirectory base;
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  std::optional<DirectoryLock> mine(base.path());
  const pid_t child = ::fork();
  if (child == 0) {
    mine.reset();  // as Python's collector may do it
    if (::write(ends[1], "!", 1) == 1) ::pause();
    ::_exit(0);
  }
  const pid_t idle = ::fork();
  if (idle == 0) {
    ::pause();
    ::_exit(0);
  }
  char byte = 0;
  REQUIRE(::read(ends[0], &byte, 1) == 1);
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK_THROWS_WITH(DirectoryLock(base.path()), Catch::Contains("B2204") && Catch::Contains("That is this process."));
  mine.reset();
  CHECK_NOTHROW(DirectoryLock(base.path()));
  for (const pid_t each : {child, idle}) {
    ::kill(each, SIGKILL);
    ::waitpid(each, nullptr, 0);
  }
}

TEST_CASE("stale scratch files are removed, and nothing else is") {
  const TemporaryDirectory directory;
  { const File stale(directory.path() / scratch_name(), {.create = true}); }
  { const File other(directory.path() / "precious", {.create = true}); }
  CHECK(remove_stale_scratch(directory.path()) == 1);
  CHECK(remove_stale_scratch(directory.path()) == 0);
  CHECK_THROWS_WITH(remove_stale_scratch(directory.path() / "none"),
                    Contains("B3201") && Contains("there is no such directory") && !Contains("byte"));
  CHECK(std::filesystem::exists(directory.path() / "precious"));
}
