// Tests of the homes of whole matrices, of the parts that go there, and of what the verifier finds in their updates.
#include <ballast/planner.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <set>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/verify.h"
#include "tests/plan/without.h"
#include "zero/plan/layout.h"
#include "zero/plan/matrix_homes.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// The matrices of a Llama, as Muon has them: without embeddings, head and norms.
Model matrices_of_llama(const LlamaShape& shape) {
  Model model = llama(shape);
  for (Unit& unit : model.units) {
    for (Tensor& tensor : unit.tensors)
      tensor.frozen = !unit.name.starts_with("layers") || tensor.shape.size() != 2;
  }
  return model;
}

double operations(const Tensor& tensor) {
  return kernels::operations_of_step({.rows = tensor.shape[0], .columns = tensor.shape[1]});
}

CompiledPlan muon_plan(std::size_t ranks, const Spread& state) {
  PlanSetup setup{.model = matrix_model(), .placement = placement_of_stage(3, ranks), .tile_elements = 128};
  setup.placement.state = state;
  return plan_of(with_muon(setup));
}

}  // namespace

TEST_CASE("a step of an orthogonalization costs three products of matrices") {
  CHECK(kernels::operations_of_step({.rows = 3, .columns = 5, .count = 2}) == 2 * (2 * 2 * 3 * 3 * 5 + 2 * 3 * 3 * 3));
  CHECK(kernels::operations_of_step({.rows = 5, .columns = 3}) == 2 * 2 * 3 * 3 * 5 + 2 * 3 * 3 * 3);
}

TEST_CASE("the work of whole matrices is divided among ranks, and no two matrices share memory") {
  const Model model = matrices_of_llama(llama_70b);
  for (const std::size_t ranks : {2u, 4u, 8u, 64u}) {
    const Layout layout = make_layout(model, ranks, std::size_t{1} << 20);
    const std::vector<UnitMatrices> homes = home_matrices(model, layout);
    std::vector<double> work(ranks);
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
      std::vector<std::size_t> free_from(ranks);
      std::set<std::size_t> tensors;
      for (const auto& [tensor, home, begin] : homes[unit].matrices) {
        work.at(home) += operations(model.units[unit].tensors[tensor]);
        CHECK(tensors.insert(tensor).second);
        CHECK(begin >= free_from[home]);
        free_from[home] = begin + model.units[unit].tensors[tensor].elements();
        CHECK(free_from[home] <= homes[unit].elements);
      }
      const auto& all = model.units[unit].tensors;
      CHECK(tensors.size() == static_cast<std::size_t>(std::ranges::count(all, false, &Tensor::frozen)));
    }
    const double largest = operations(model.units[1].tensors[4]);
    const double mean = std::accumulate(work.begin(), work.end(), 0.0) / static_cast<double>(ranks);
    CAPTURE(ranks);
    CHECK(std::ranges::max(work) - std::ranges::min(work) <= largest);
    CHECK(std::ranges::max(work) < 1.15 * mean);
    // No rank could do a unit in less time than its largest matrix takes.
    CHECK(homes[1].operations < std::max(1.01 * largest, 1.35 * mean / 80));
  }
}

TEST_CASE("with one rank matrices lie as its shard does") {
  const Model model = matrix_model();
  const Layout layout = make_layout(model, 1, 128);
  const auto homes = home_matrices(model, layout);
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    for (const HomedMatrix& matrix : homes[unit].matrices)
      CHECK(matrix.begin == layout.units[unit].tensor_begin[matrix.tensor]);
  }
}

TEST_CASE("what ranks send to homes is what those receive, in one order, and all of each matrix") {
  const Model model = matrix_model();
  for (const std::size_t ranks : {1u, 2u, 3u, 7u}) {
    const Layout layout = make_layout(model, ranks, 128);
    const auto homes = home_matrices(model, layout);
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
      std::vector<MatrixParts> parts;
      for (std::size_t rank = 0; rank < ranks; ++rank)
        parts.push_back(parts_of(model.units[unit], layout.units[unit], homes[unit], rank));
      for (std::size_t home = 0; home < ranks; ++home) {  // no two parts of a home share memory
        std::vector<std::size_t> uses(homes[unit].elements);
        for (const MatrixPart& part : parts[home].in_matrices) {
          for (std::size_t i = part.begin; i < part.begin + part.count; ++i)
            ++uses.at(i);
        }
        CHECK(std::ranges::count_if(uses, [](std::size_t times) { return times > 1; }) == 0);
      }
      std::size_t elements = 0;
      for (std::size_t from = 0; from < ranks; ++from) {
        for (std::size_t to = 0; to < ranks; ++to) {
          std::vector<std::size_t> sent;
          std::vector<std::size_t> received;
          for (const MatrixPart& part : parts[from].in_shard)
            if (part.rank == to) sent.push_back(part.count);
          for (const MatrixPart& part : parts[to].in_matrices)
            if (part.rank == from) received.push_back(part.count);
          CHECK(sent == received);
          elements += std::accumulate(sent.begin(), sent.end(), std::size_t{0});
        }
      }
      std::size_t expected = 0;
      for (const Tensor& tensor : model.units[unit].tensors)
        expected += tensor.frozen ? 0 : tensor.elements();
      CHECK(elements == expected);
    }
  }
}

TEST_CASE("blocks of one shape and group share a learning rate, and runs of a tile name it") {
  const Model model = matrix_model();
  const Layout layout = make_layout(model, 2, 256);
  const MatrixGroups groups(model);
  REQUIRE(groups.all().size() == 7);  // 8 x 32, 4 x 32, 20 x 24, 24 x 20 of another group, 0 x 4, 7 x 9, 30 x 29
  const auto runs = groups.runs_in(model.units[0], layout.units[0], {128, 700});
  REQUIRE(runs.size() == 3);
  CHECK(runs[0] == kernels::Run{.begin = 0, .count = 128, .group = 0, .tensor = 0, .tensor_begin = 0});
  CHECK(runs[1] == kernels::Run{.begin = 128, .count = 256, .group = 1, .tensor = 0, .tensor_begin = 0});
  CHECK(runs[2] == kernels::Run{.begin = 384, .count = 316, .group = 2, .tensor = 2, .tensor_begin = 512});
}

TEST_CASE("the directions of a unit are collected while the products of the one before are computed") {
  const CompiledPlan plan = muon_plan(2, Tier::host);
  std::vector<std::pair<OpKind, std::size_t>> order;
  for (const Op& op : plan.program().ops) {
    if (op.kind == OpKind::collect || op.kind == OpKind::orthogonalize) order.emplace_back(op.kind, op.unit);
  }
  const std::vector<std::pair<OpKind, std::size_t>> expected{
      {OpKind::collect, 0},       {OpKind::collect, 1},
      {OpKind::orthogonalize, 0}, {OpKind::orthogonalize, 1},  // unit 2 has no matrices
      {OpKind::collect, 3},       {OpKind::orthogonalize, 3}};
  CHECK(order == expected);
}

TEST_CASE("the verifier finds an update with a direction that is not orthogonal, of another unit or another step") {
  const CompiledPlan plan = muon_plan(2, Tier::device);
  const auto problem_with = [&](const auto& change) {
    Program broken = plan.program();
    change(broken.ops);
    return fmt::format("{}", fmt::join(verify(plan.input(), broken), "; "));
  };
  const auto first = [](std::vector<Op>& ops, OpKind kind) { return std::ranges::find(ops, kind, &Op::kind); };
  using Catch::Contains;
  CHECK(problem_with([](std::vector<Op>&) {}).empty());
  CHECK_THAT(problem_with([&](std::vector<Op>& ops) { first(ops, OpKind::orthogonalize)->kind = OpKind::meet; }),
             Contains("needs orthogonal matrices of unit 0"));
  CHECK_THAT(problem_with([&](std::vector<Op>& ops) {
               std::swap(*first(ops, OpKind::orthogonalize), *first(ops, OpKind::distribute));
             }),
             Contains("does not wait for"));
  for (const OpKind kind : {OpKind::collect, OpKind::distribute, OpKind::orthogonalize}) {
    CHECK_THAT(problem_with([&](std::vector<Op>& ops) { first(ops, kind)->unit = 3; }), Contains("of unit 3"));
  }
  // The other one of the ring.
  CHECK_THAT(problem_with([&](std::vector<Op>& ops) {
               const auto& second = *std::find_if(
                   ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::update && op.unit == 1; });
               first(ops, OpKind::update)->from.slot = second.from.slot;
             }),
             Contains("needs orthogonal direction of unit 0") && Contains("finds direction of unit 1"));
}

TEST_CASE("the planner plans 70B matrices with Muon on 8 GPUs, and counts their products and memory") {
  constexpr std::size_t gib = std::size_t{1} << 30;
  const Model model = matrices_of_llama(llama_70b);
  const std::vector<UnitWork> work(model.units.size(), {0.05, 0.1});
  ChoiceInput question{.model = model,
                       .machine = {.bytes = {75 * gib, 240 * gib, 1000 * gib},
                                   .gather = 300e9,
                                   .reduce = 300e9,
                                   .upload = 50e9,
                                   .download = 50e9,
                                   .read = 3e9,
                                   .write = 2e9,
                                   .device_memory = 2.5e12,
                                   .host_memory = 50e9},
                       .work = work,
                       .ranks = 8,
                       .names = optim::Muon::state,
                       .orthogonalization_steps = 5};
  const Choice choice = choose(question);
  CHECK(choice.placement.shards == 8);
  for (const char* owner : {"directions", "matrices", "workspace"})
    CHECK(std::ranges::find(choice.ledger, owner, &LedgerEntry::owner) != choice.ledger.end());
  const auto busy = [&](Lane lane) {
    return price(question, choice.placement).simulation.busy[static_cast<std::size_t>(lane)];
  };
  const double without = busy(Lane::update);
  question.machine.products = 400e12;
  double operations = 0;
  for (const UnitMatrices& unit : home_matrices(model, lay_out(model, choice.placement, 0)))
    operations += 5 * unit.operations;
  CHECK(busy(Lane::update) - without == Approx(operations / 400e12).epsilon(1e-3));
  CHECK(operations / 400e12 > 1.0);  // seconds
  const double exchanges = busy(Lane::reduce);
  question.orthogonalization_steps.reset();
  const double elements = 80 * (2 * 8192.0 * 8192 + 2 * 1024.0 * 8192 + 3 * 28672.0 * 8192);
  CHECK(exchanges - busy(Lane::reduce) ==
        Approx(2 * 7.0 / 8 * elements / 8 * 2 / 300e9 + 160 * question.machine.collective_latency).epsilon(0.01));
}
