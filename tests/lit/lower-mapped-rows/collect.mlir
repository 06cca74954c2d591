// Values are compressed, and nonzeros without a bit are counted.
// RUN: gossamer-opt %s -p 'expose-storage,lower-mapped-rows' | filecheck %s

// CHECK-LABEL: func.func @collect(
// CHECK-SAME:    %[[P:[a-z0-9]*]]: memref<?xi64>, %[[M:[a-z0-9]*]]: memref<?x?xi16>, %[[D:[a-z0-9]*]]: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?xf32>, %[[OTHERS:[a-z0-9]*]]: memref<?xi64>
// CHECK:         scf.parallel
// CHECK:           %[[SUM:.*]]:2 = scf.for
// CHECK:             scf.for
// CHECK:               memref.prefetch %[[D]]{{.*}}, read
// CHECK:               %[[GIVEN:.*]] = vector.load %[[D]]
// CHECK:               llvm.call_intrinsic "llvm.x86.avx512.mask.compress.v16f32"
// CHECK:               vector.maskedstore %[[OUT]]
// CHECK:               arith.cmpf une, %[[GIVEN]]
// CHECK:               arith.xori
// CHECK:               math.ctpop
// CHECK:           memref.store %[[SUM]]#1, %[[OTHERS]]
func.func @collect(%p: tensor<?xi64>, %m: tensor<?x?xi16>, %d: tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?xi64>) {
  %v, %o = "kernel.collect_mapped"(%p, %m, %d) : (tensor<?xi64>, tensor<?x?xi16>, tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?xi64>)
  return %v, %o : tensor<?xf32>, tensor<?xi64>
}
