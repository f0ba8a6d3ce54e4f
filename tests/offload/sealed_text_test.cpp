#include "offload/run_directory.h"

#include <catch2/catch.hpp>
#include <fstream>

#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;

TEST_CASE("a sealed text is read exactly as it was written, or not at all") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "description";
  CHECK_FALSE(read_sealed_text(path).has_value());
  write_sealed_text(path, "one\n");
  write_sealed_text(path, "one\ntwo\n");
  CHECK(read_sealed_text(path) == "one\ntwo\n");
  CHECK(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 1);
  for (const std::uintmax_t bytes : {std::filesystem::file_size(path) - 1, std::uintmax_t{4}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(path, bytes);
    CHECK_FALSE(read_sealed_text(path).has_value());
  }
  write_sealed_text(path, "one\n");
  std::fstream(path) << "One";
  CHECK_FALSE(read_sealed_text(path).has_value());
}

TEST_CASE("a sealed text that the drive cannot read counts as missing") {
  CHECK_FALSE(read_sealed_text("/proc/self/mem").has_value());  // its first bytes are an Input/output error
}

TEST_CASE("an unfinished file of a killed writer does not stop the next one") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "description";
  std::ofstream(path.string() + ".unfinished") << "half";
  write_sealed_text(path, "whole\n");
  CHECK(read_sealed_text(path) == "whole\n");
}
