// Tests of runs on several drives that other ranks continue.
#include "tests/zero/moved_run.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

TEST_CASE("a run on two drives moves on both") {
  const TemporaryDirectory first;
  const TemporaryDirectory second;
  KeptRun run = run_of(3);
  run.second = second.path();
  const Ended before = begun(run, first);
  run.ranks = 2;
  check_resumes(run, before.values);
  CHECK(names_in(second.path()) == "state-2.records state-2.records ");
}

// A crash may come between the drives: while old records are removed, or while new ones get their names.
TEST_CASE("records that are only on one of two drives do not count") {
  const TemporaryDirectory first;
  const TemporaryDirectory second;
  const TemporaryDirectory of_first;  // as it was before
  const auto empty = [](const TemporaryDirectory& drive) {
    for (const auto& entry : std::filesystem::directory_iterator(drive.path()))
      std::filesystem::remove_all(entry.path());
  };
  KeptRun run = run_of(3);
  run.second = second.path();
  const Ended before = begun(run, first);
  std::filesystem::copy(first.path(), of_first.path(), std::filesystem::copy_options::recursive);

  SECTION("old ones, where the new ones are whole") {
    run.ranks = 2;
    check_resumes(run, before.values);
    std::filesystem::copy(of_first.path(), first.path(),
                          std::filesystem::copy_options::recursive | std::filesystem::copy_options::skip_existing);
    check_resumes(run, before.values);
  }
  SECTION("new ones, before the first step") {
    empty(first);
    empty(second);
    begun(run, first, 0);
    empty(second);
    const Ended again = train(run, 1);
    CHECK(again.failures == no_failures(run.ranks));
    CHECK(again.began_at == std::vector<std::uint64_t>(run.ranks, 0));
  }
  SECTION("all there are") {
    empty(second);
    check_refused(run, Contains("B3202") || Contains("B1009"));
  }
}
