// Tests of the updates that are refused, and of the messages.
#include <ballast/error.h>

#include <catch2/catch.hpp>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::kernels;
using ballast::Code;
using ballast::DType;
using Catch::Matchers::Contains;

namespace {

// A valid update, in which each test spoils one thing.
struct Request {
  explicit Request(const UpdateShape& shape) : memory(shape), tile(memory.tile()), runs{{0, shape.count, 0}} {}

  UpdateMemory memory;
  TileMemory tile;
  std::vector<Run> runs;
  std::vector<GroupStep> groups{{.rule = sample_rules().front()}};
};

Request good(StateFormat format = StateFormat::fp32) { return Request({.format = format, .count = 500}); }

void refused(const Request& request, Code code, const std::string& text) {
  const auto backend = cpu_backend({.threads = 1});
  try {
    backend->update(request.tile, request.runs, request.groups);
    FAIL("accepted, though: " << text);
  } catch (const ballast::UsageError& error) {
    CHECK(error.code() == code);
    CHECK_THAT(error.what(), Contains(text));
  }
}

}  // namespace

TEST_CASE("a good update is accepted, and so is an empty one without any memory") {
  for (const StateFormat format : all_state_formats) {
    const Request request = good(format);
    CHECK_NOTHROW(cpu_backend()->update(request.tile, request.runs, request.groups));
    CHECK_NOTHROW(cpu_backend()->update({.format = format}, {}, {}));
    const std::vector<Run> nothing{{0, 0, 0}};
    CHECK_NOTHROW(cpu_backend()->update({.format = format}, nothing, request.groups));
  }
}

TEST_CASE("an update without one of its arrays names the array and the format") {
  const auto without = [](StateFormat format, auto forget, const std::string& text) {
    Request request = good(format);
    forget(request.tile);
    refused(request, Code::bad_argument, text);
  };
  without(
      StateFormat::fp32, [](TileMemory& t) { t.parameter = nullptr; },
      "cannot update: there is no memory for the parameter");
  without(
      StateFormat::fp32, [](TileMemory& t) { t.gradient = nullptr; },
      "cannot update: there is no memory for the gradient");
  without(
      StateFormat::split, [](TileMemory& t) { t.master = nullptr; }, "memory for the master in format split");
  without(
      StateFormat::bf16, [](TileMemory& t) { t.momentum = nullptr; },
      "cannot update: there is no memory for the momentum");
  without(
      StateFormat::bf16, [](TileMemory& t) { t.variance = nullptr; },
      "cannot update: there is no memory for the variance");
  without(
      StateFormat::compact, [](TileMemory& t) { t.momentum_scales = nullptr; },
      "cannot update: there is no memory for the momentum scales");
  without(
      StateFormat::four_bit, [](TileMemory& t) { t.variance_scales = nullptr; },
      "cannot update: there is no memory for the variance scales");
}

TEST_CASE("a rule needs only the arrays that it has") {
  Request request = good(StateFormat::compact);
  request.tile.momentum = request.tile.variance = nullptr;
  request.tile.momentum_scales = request.tile.variance_scales = nullptr;
  request.groups = {{.rule = Sgd{.lr = 0.1f, .l2 = 0.0f}}};
  CHECK_NOTHROW(cpu_backend()->update(request.tile, request.runs, request.groups));
}

TEST_CASE("gradients and parameters of integers are refused") {
  Request request = good();
  request.tile.gradient_dtype = DType::u8;
  refused(request, Code::wrong_dtype, "gradients and parameters must be floating-point numbers");
  request = good();
  request.tile.parameter_dtype = DType::u8;
  refused(request, Code::wrong_dtype, "parameter u8");
}

TEST_CASE("formats that store the lower bits of a bf16 parameter refuse other parameters") {
  for (const StateFormat format : all_state_formats) {
    if (format == StateFormat::fp32) continue;
    for (const DType dtype : {DType::fp32, DType::fp16}) {
      Request request = good(format);
      request.tile.parameter_dtype = dtype;
      refused(request, Code::unsupported, "stores the lower bits of a bf16 parameter");
    }
  }
}

TEST_CASE("a run past the end of its tile is refused, however large its offsets") {
  for (const Run run : {Run{0, 501, 0}, Run{500, 1, 0}, Run{501, 0, 0}, Run{1, SIZE_MAX, 0}, Run{SIZE_MAX, 1, 0}}) {
    Request request = good();
    request.runs = {run};
    refused(request, Code::wrong_size, "a run reaches past the end of its tile");
  }
}

TEST_CASE("a run of a group that was not given is refused") {
  Request request = good();
  request.runs = {{0, 10, 1}};
  refused(request, Code::bad_argument, "a run names parameter group 1");
}

TEST_CASE("formats with groups of elements refuse runs and tiles that start inside one") {
  for (const StateFormat format : {StateFormat::bf16, StateFormat::compact, StateFormat::four_bit}) {
    Request request = good(format);
    request.runs = {{64, 10, 0}};
    refused(request, Code::unaligned, "needs runs that start at a group of elements");
    request = good(format);
    request.tile.first_index = 1;
    refused(request, Code::unaligned, "multiples of 128 elements");
  }
}

TEST_CASE("runs that overlap or stand in the wrong order are refused") {
  for (const Run second : {Run{99, 10, 0}, Run{0, 10, 0}}) {
    Request request = good();
    request.runs = {{50, 50, 0}, second};
    refused(request, Code::bad_argument, "the runs of an update overlap, or are not in order");
  }
}

TEST_CASE("memory between two elements is refused") {
  const auto moved = [](auto move, const std::string& text) {
    Request request = good();
    move(request.tile);
    refused(request, Code::unaligned, text);
  };
  moved([](TileMemory& t) { ++t.parameter; }, "the parameter");
  moved([](TileMemory& t) { ++t.gradient; }, "the gradient");
  moved([](TileMemory& t) { t.master += 2; }, "the master");
  moved([](TileMemory& t) { t.momentum += 2; }, "the momentum");
  moved([](TileMemory& t) { t.variance += 2; }, "the variance");
}
