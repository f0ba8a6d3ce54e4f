# `cmake --install` installs the libraries, the public headers <ballast/...>, and the files of find_package(ballast).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)

# What users link: ballast::ballast is all of it.
set(libraries ballast)
foreach(name runtime kernels offload optim comm plan engine runs checkpoint zero)
  set_target_properties(ballast_${name} PROPERTIES EXPORT_NAME ${name})
  list(APPEND libraries ballast_${name})
endforeach()
install(TARGETS ${libraries} EXPORT ballast INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ballast FILE ballastTargets.cmake NAMESPACE ballast:: DESTINATION ${config_folder})

install(DIRECTORY kernels/include/ optim/include/ zero/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(BALLAST_HAS_CUDA)
  install(FILES ${CUDA_cudart_static_LIBRARY} DESTINATION lib/ballast RENAME libcudart_static.a)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

get_property(dependencies GLOBAL PROPERTY BALLAST_DEPENDENCIES)
list(REMOVE_DUPLICATES dependencies)
configure_package_config_file(.ci/cmake/ballastConfig.cmake.in ballastConfig.cmake INSTALL_DESTINATION ${config_folder}
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(ballastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/ballastConfig.cmake
  ${PROJECT_BINARY_DIR}/ballastConfigVersion.cmake
  .ci/cmake/FindSodium.cmake
  .ci/cmake/FindUring.cmake
  DESTINATION ${config_folder})
