#include "zero/comm/connect.h"

#include <catch2/catch.hpp>
#include <map>
#include <set>

using namespace ballast;
using Catch::Contains;

namespace {

using Variables = std::map<std::string, std::string>;

Launch launch(const Variables& variables, std::size_t times_before = 0) {
  const Environment environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
  return launch_from(environment, times_before);
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) {
    variables[name] = value;
  }
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables torchrun{{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "node1"},
                         {"MASTER_PORT", "29500"},
                         {"TORCHELASTIC_RUN_ID", "abc"}};
const Variables by_hand{{"RANK", "1"}, {"WORLD_SIZE", "2"}};
const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"PMIX_NAMESPACE", "3912302593"}};
const Variables slurm{{"SLURM_PROCID", "9"},  {"SLURM_NTASKS", "16"},
                      {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "77"},
                      {"SLURM_STEP_ID", "2"}, {"SLURM_STEP_NUM_NODES", "2"},
                      {"MASTER_PORT", ""},    {"SLURM_STEP_NODELIST", "gpu[07-08,11],login"}};

}  // namespace

TEST_CASE("each launcher's variables give the rank, the world size, the host and the job") {
  struct Row {
    Variables variables;
    std::string launcher;
    std::size_t rank, size, local_rank;
    std::string host, job;
  };
  const std::vector<Row> rows{
      {{}, "", 0, 1, 0, "", ""},
      {torchrun, "torchrun", 5, 8, 1, "node1", "abc"},
      {by_hand, "RANK", 1, 2, 0, "127.0.0.1", ""},
      {open_mpi, "Open MPI", 3, 4, 3, "127.0.0.1", "3912302593"},
      {slurm, "Slurm", 9, 16, 1, "gpu07", "77.2"},
      // A process that another launcher started under Slurm has both launchers' variables; those of the other count.
      {with(slurm, open_mpi), "Open MPI", 3, 4, 3, "127.0.0.1", "3912302593"},
      {with(with(slurm, open_mpi), torchrun), "torchrun", 5, 8, 1, "node1", "abc"},
      // A batch script has one process outside of any step.
      {without(slurm, "SLURM_STEP_ID"), "", 0, 1, 0, "", ""},
      {with(by_hand, {{"BALLAST_JOB", "mine"}}), "RANK", 1, 2, 0, "127.0.0.1", "mine"},
  };
  for (const Row& row : rows) {
    const Launch found = launch(row.variables);
    INFO(row.launcher << " " << row.job);
    CHECK(found.launcher == row.launcher);
    CHECK(found.rank == row.rank);
    CHECK(found.size == row.size);
    CHECK(found.local_rank == row.local_rank);
    CHECK(found.hub.host == row.host);
    CHECK(found.job == row.job);
  }
}

TEST_CASE("the launcher says whether ranks are on several hosts") {
  const auto several = [](const Variables& variables) {
    const Environment environment([&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
    return has_other_hosts(launch_from(environment), environment);
  };
  CHECK_FALSE(several({}));
  CHECK(several(slurm));
  CHECK_FALSE(several(with(slurm, {{"SLURM_STEP_NUM_NODES", "1"}})));
  CHECK_FALSE(several(open_mpi));
  CHECK(several(with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"MASTER_ADDR", "node1"}})));
  CHECK(several(with(torchrun, {{"LOCAL_WORLD_SIZE", "4"}})));
  CHECK_FALSE(several(with(torchrun, {{"LOCAL_WORLD_SIZE", "8"}})));
  CHECK(several(with(by_hand, {{"LOCAL_WORLD_SIZE", "1"}})));
  CHECK_FALSE(several(by_hand));  // it does not say
}

TEST_CASE("the first host is found in every form of Slurm's node list") {
  const std::vector<std::pair<std::string, std::string>> rows{
      {"one", "one"},       {"one,two", "one"},        {"node[07-12,3],other", "node07"}, {"node[3,7-12]", "node3"},
      {"node[5]", "node5"}, {"a-b[001-002]", "a-b001"}};
  for (const auto& [list, first] : rows) {
    CHECK(launch(with(slurm, {{"SLURM_STEP_NODELIST", list}})).hub.host == first);
  }
}

TEST_CASE("ranks connect at a port derived from torch's, or at the requested one") {
  const auto port = [](const Variables& variables) { return launch(variables).hub.port; };
  CHECK(port(torchrun) == 29611);
  CHECK(port(with(torchrun, {{"MASTER_PORT", "32656"}})) == 32767);
  CHECK(port(with(torchrun, {{"BALLAST_PORT", "7000"}})) == 7000);
  CHECK(port(open_mpi) == port(open_mpi));
  CHECK(port(open_mpi) != port(with(open_mpi, {{"PMIX_NAMESPACE", "3912302594"}})));
  const auto master_at = [&](const char* place) { return port(with(torchrun, {{"MASTER_PORT", place}})); };
  CHECK(master_at("40000") != master_at("40001"));
  for (const std::uint16_t own : {port(slurm), master_at("32657"), master_at("40000"), master_at("65535")}) {
    CHECK(own >= 20000);
    CHECK(own < 32000);  // systems assign no such port to an outgoing connection
  }
}

TEST_CASE("each further connection of a process uses another port") {
  for (const Variables& variables :
       {torchrun, slurm, with(torchrun, {{"MASTER_PORT", "40000"}}), with(torchrun, {{"BALLAST_PORT", "65535"}})}) {
    std::set<std::uint16_t> ports;
    for (std::size_t before = 0; before < 5; ++before) {
      ports.insert(launch(variables, before).hub.port);
    }
    CHECK(ports.size() == 5);
    CHECK(ports.count(0) == 0);
  }
  CHECK(launch(torchrun, 1).hub.port != launch(with(torchrun, {{"MASTER_PORT", "29501"}})).hub.port);  // a neighbour's
}

TEST_CASE("a missing or invalid variable is named") {
  struct Row {
    Variables variables;
    std::string named;
  };
  const std::vector<Row> rows{
      {without(torchrun, "WORLD_SIZE"), "WORLD_SIZE is not set"},
      {with(torchrun, {{"RANK", "8"}}), "RANK=8 in a world of 8"},
      {with(torchrun, {{"RANK", "-1"}}), "RANK=-1"},
      {with(torchrun, {{"RANK", "one"}}), "RANK=\"one\""},
      {with(torchrun, {{"WORLD_SIZE", "0"}, {"RANK", "0"}}), "a rank below WORLD_SIZE=0"},
      {with(torchrun, {{"MASTER_PORT", "0"}}), "MASTER_PORT=0"},
      {with(torchrun, {{"BALLAST_PORT", "70000"}}), "BALLAST_PORT=70000"},
      {without(open_mpi, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"},
      {with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), "MASTER_ADDR"},
      {without(slurm, "SLURM_PROCID"), "SLURM_PROCID"},
      {without(slurm, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST"},
  };
  for (const Row& row : rows) {
    CHECK_THROWS_WITH(launch(row.variables), Contains("B1006") && Contains(row.named));
  }
}
