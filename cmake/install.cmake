# Installs the headers, the library, the CMake package and the pkg-config file; all relocatable.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hybridopt)
install(FILES
  ${PROJECT_SOURCE_DIR}/include/offload.h ${PROJECT_SOURCE_DIR}/include/offload_simple.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS hybridopt EXPORT hybridopt-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT hybridopt-targets NAMESPACE hybridopt:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/hybridopt-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_SOURCE_DIR}/cmake/hybridopt-config.cmake
  ${PROJECT_BINARY_DIR}/hybridopt-config-version.cmake
  DESTINATION ${package_dir})

# pkg-config finds the prefix from where its file lies.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkgconfig_to_prefix
  ${CMAKE_INSTALL_PREFIX}/${pkgconfig_dir} ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/hybridopt.pc.in ${PROJECT_BINARY_DIR}/hybridopt.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/hybridopt.pc DESTINATION ${pkgconfig_dir})

# cpack -G DEB makes a Debian package of what is installed; what it depends on is read from the files.
if(top_level)
  set(CPACK_PACKAGE_CONTACT "hybridopt maintainers")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Optimizers whose state lives in host memory (library, header, tool)")
  set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_STRIP_FILES ON)
  include(CPack)
endif()
