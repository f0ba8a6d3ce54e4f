// Tests of links, files and directories that another user may have left where Ballast writes. What a link leads to stays as it is.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <functional>
#include <iterator>

#include "offload/file.h"
#include "offload/run_directory.h"
#include "tests/limited_child.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;
using namespace ballast::testing;
using Catch::Contains;
namespace fs = std::filesystem;

namespace {

constexpr uid_t other_user = 1234;
const std::string precious = "the user's own text";

fs::path make_precious(const fs::path& folder) {
  std::ofstream(folder / "precious") << precious;
  return folder / "precious";
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("a lock does not follow a link, and does not truncate what it leads to") {
  const TemporaryDirectory folder;
  const fs::path target = make_precious(folder.path());
  const fs::path lock = folder.path() / "ballast.lock";
  fs::create_symlink(target, lock);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()),
                    Contains("B2206") && Contains("it is a link") && Contains("ballast.lock"));
  fs::remove(lock);
  fs::create_symlink(folder.path() / "nothing there", lock);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()), Contains("B2206"));
  CHECK_FALSE(fs::exists(folder.path() / "nothing there"));
  fs::remove(lock);
  fs::create_hard_link(target, lock);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()), Contains("B2206") && Contains("2 names"));
  fs::remove(lock);
  REQUIRE(::mkfifo(lock.c_str(), 0600) == 0);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()), Contains("B2206") && Contains("no regular file"));
  fs::remove(lock);
  fs::create_directory(lock);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()), Contains("B2206") && Contains("no regular file"));
  fs::remove(lock);
  CHECK(text_of(target) == precious);
  CHECK_NOTHROW(DirectoryLock(folder.path()));
}

TEST_CASE("the directory of a run is this user's own") {
  const TemporaryDirectory folder;
  const fs::path run = folder.path() / "run";
  fs::create_directory(folder.path() / "elsewhere");
  fs::create_symlink(folder.path() / "elsewhere", run);
  CHECK_THROWS_WITH(RunDirectory(run), Contains("B2206") && Contains("it is a link"));
  CHECK(fs::is_empty(folder.path() / "elsewhere"));
  fs::remove(run);
  fs::create_directory(run);
  fs::permissions(run, fs::perms::all);
  CHECK_THROWS_WITH(RunDirectory(run), Contains("B2206") && Contains("all users can change its files"));
  fs::permissions(run, fs::perms::owner_all);
  CHECK_NOTHROW(RunDirectory(run));
  if (::geteuid() != 0) return skip("giving a directory to another user needs root");
  REQUIRE(::chown(run.c_str(), other_user, other_user) == 0);
  CHECK_THROWS_WITH(RunDirectory(run), Contains("B2206") && Contains("it belongs to user 1234"));
}

TEST_CASE("a file of another user is not opened to write to it") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  const TemporaryDirectory folder;
  const fs::path file = make_precious(folder.path());
  fs::permissions(file, fs::perms::all);
  fs::permissions(folder.path(), fs::perms::all);
  const std::string failure = in_a_child([&]() -> std::string {
    if (::setuid(other_user) != 0) return "no other user";
    open_own_file(file, O_RDWR);
    return "opened";
  });
  CHECK_THAT(failure, Contains("B2206") && Contains("it belongs to user 0, not to 1234"));
}

TEST_CASE("where a directory of another user refuses a file, the error says whose it is") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  const TemporaryDirectory folder;
  fs::permissions(folder.path(), fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  const auto failure_of = [&](const std::function<void()>& use) {
    return in_a_child([&]() -> std::string {
      if (::setuid(other_user) != 0) return "no other user";
      use();
      return "used";
    });
  };
  const auto check_names_owner = [&](const std::function<void()>& use) {
    CHECK_THAT(failure_of(use), Contains("Permission denied: " + folder.path().string() +
                                         " belongs to user 0, and this process runs as user 1234") &&
                                    Contains("B3201") && Contains("Give it to user 1234"));
  };
  check_names_owner([&] { RunDirectory(folder.path() / "run"); });
  check_names_owner([&] { File(folder.path() / "file", {.create = true}); });
  check_names_owner([&] { File::nameless(folder.path()); });
  fs::permissions(folder.path(), fs::perms::owner_all);
  check_names_owner([&] { DirectoryLock(folder.path() / "run"); });
}

TEST_CASE("a link in the place of an unfinished file is removed, and not followed") {
  const TemporaryDirectory folder;
  const fs::path target = make_precious(folder.path());
  const fs::path text = folder.path() / "state.description";
  fs::create_symlink(target, text.string() + ".unfinished");
  fs::create_symlink(target, text);
  write_text(text, "whole");
  CHECK(text_of(target) == precious);
  CHECK(text_of(text) == "whole");
}

TEST_CASE("a file that is opened to write to it is no link") {
  const TemporaryDirectory folder;
  const fs::path target = make_precious(folder.path());
  fs::create_symlink(target, folder.path() / "state.records");
  CHECK_THROWS_WITH(File(folder.path() / "state.records"), Contains("B2206") && Contains("it is a link"));
  CHECK_NOTHROW(File(folder.path() / "state.records", {.writable = false}));
}
