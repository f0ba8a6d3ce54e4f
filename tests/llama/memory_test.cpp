// Compares the memory that the whole program takes, in its own process, with the memory that it announced.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstdlib>

#include "kernels/runtime/system_files.h"
#include "tests/mebibyte.h"
#include "tests/sanitizer.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"

using namespace ballast;

namespace {

// 80 million parameters in 4 layers: hundreds of MiB, little arithmetic.
constexpr const char* model = "--layers 4 --width 1280 --heads 16 --context 64 --batch 1 --steps 2";

struct Ended {
  int status = 0;
  std::string errors;  // the text on stderr
  std::string steps;   // the text on stdout: the steps as JSON
};

// Runs it after a command of the shell.
Ended run_trainer(const std::string& options, const std::string& before = "true") {
  const TemporaryDirectory folder;
  const auto file = [&](const char* name) { return (folder.path() / name).string(); };
  const std::string command = fmt::format("{}; {} {} --drive {} {} > {} 2> {}", before, BALLAST_TRAINER, model,
                                          folder.path().string(), options, file("stdout"), file("stderr"));
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 255, read_text(file("stderr")).value_or(""),
          read_text(file("stdout")).value_or("")};
}

// Returns a number of the last step.
std::size_t number_in(const std::string& steps, const std::string& key) {
  const std::size_t found = steps.rfind("\"" + key + "\":");
  if (found == std::string::npos) throw std::runtime_error("no " + key + " in: " + steps);
  return leading_number(std::string_view(steps).substr(found + key.size() + 3)).value();
}

}  // namespace

// It takes at least 300 MiB, because libraries, stacks and malloc keep a few MiB more or less.
TEST_CASE("a training's resident memory is within 3 % of the announced bytes") {
  if (testing::sanitized) return skip("a sanitizer keeps its own memory");
  const char* all_on_drive =
      "--stage 3 --parameters nvme --state nvme --state-format compact --update-in-backward --tile 2Mi --staging 16";
  for (const char* where : {
           "--stage 0",
           "--stage 3 --ranks 2 --threads 1 --gradients host --state host",
           "--stage 3 --state nvme --micro-steps 2 --prefetch 3 --layers 3",
           "--stage 3 --parameters nvme --gradients host --state nvme --layers 3",
           all_on_drive,
       }) {
    CAPTURE(where);
    const Ended ended = run_trainer(fmt::format("--layers 2 --width 1024 {}", where));
    REQUIRE(ended.errors == "");
    const std::size_t announced = number_in(ended.steps, "announced_bytes");
    const std::size_t held = number_in(ended.steps, "peak_bytes") - number_in(ended.steps, "code_bytes") -
                             number_in(ended.steps, "before_bytes");
    CAPTURE(announced, held);
    CHECK(announced > 300 * mebibyte);
    CHECK(announced < 1024 * mebibyte);
    CHECK(held > announced * 97 / 100);  // the memory is resident, not only reserved
    CHECK(held < announced * 103 / 100);
  }
}

TEST_CASE("a training larger than memory stays within its limit, and is refused where it does not fit") {
  if (testing::sanitized) return skip("a sanitizer maps more than any limit");
  const std::string on_drive =
      "--stage 3 --parameters nvme --state nvme --state-format compact --update-in-backward --layers 8";
  const std::size_t limit = 640 * mebibyte;
  const auto limited_to = [](std::size_t bytes) { return fmt::format("ulimit -d {}", bytes >> 10); };

  const Ended kept = run_trainer(on_drive, limited_to(limit));
  REQUIRE(kept.errors == "");
  CHECK(number_in(kept.steps, "nvme") > limit);
  CHECK(number_in(kept.steps, "peak_bytes") <= limit);

  const Ended refused = run_trainer(on_drive, limited_to(limit / 2));
  CHECK(refused.status == 2);
  CHECK_THAT(refused.errors, Catch::Contains("B2001") && Catch::Contains("ulimit -d") && Catch::Contains("needed"));
  CHECK(refused.steps == "");

  // The memory that --hash needs is not part of the plan, so the kernel refuses it.
  const Ended stopped = run_trainer(fmt::format("{} --hash", on_drive), limited_to(limit));
  CHECK(stopped.status == 2);
  CHECK_THAT(stopped.errors, Catch::Contains("B2001"));
  CHECK_THAT(stopped.steps, Catch::Contains("\"step\":2"));  // the failure comes at the end
}

TEST_CASE("a training can be forecast before it begins") {
  const Ended ended = run_trainer("--stage 3 --state nvme --ranks 2 --threads 1 --layers 2 --width 256 --forecast");
  CHECK(ended.errors == "");
  CHECK(ended.status == 0);
  CHECK_THAT(ended.steps, Catch::Contains("\"forecast_seconds\":"));
}

TEST_CASE("a training whose drive has too little space is refused before it begins") {
  const Ended refused = run_trainer("--stage 3 --state nvme --layers 64 --width 65536 --heads 64 --tile 1Gi");
  CHECK(refused.status == 2);
  CHECK_THAT(refused.errors, Catch::Contains("B2202"));
}
