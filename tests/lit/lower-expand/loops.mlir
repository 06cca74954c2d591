// Bits and nonzeros become whole lines of pairs, which are multiplied as dense.
// RUN: gossamer-opt %s -p 'expose-storage,lower-expand,canonicalize,cse' | filecheck %s

// Eight tokens and two vectors of rows: the place among the values is carried along with the sums, two columns a step of two.
// CHECK-LABEL: func.func private @region_tile8(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x64xbf16>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[MASKS:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         memref.load %[[POS]]
// CHECK:         scf.for %{{[a-z0-9]*}} = %c0 to %c32 step %c2 iter_args(%[[PLACE:[a-z0-9]*]] = %{{[a-z0-9]*}}, %[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK:           %[[BITS:[a-z0-9]*]] = memref.load %[[MASKS]]
// CHECK:           %[[MASK:[a-z0-9]*]] = vector.bitcast %{{.*}} : vector<1xi32> to vector<32xi1>
// CHECK-NEXT:      vector.load %[[VAL]][%[[PLACE]]] : memref<?xbf16>, vector<32xbf16>
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.mask.expand.v32i16"(%{{.*}}, %{{.*}}, %[[MASK]])
// CHECK-NEXT:      math.ctpop %[[BITS]]
// CHECK:           %[[W0:[a-z0-9]*]] = vector.bitcast %{{.*}} : vector<32xi16> to vector<32xbf16>
// CHECK-NEXT:      %[[NEXT:[a-z0-9]*]] = arith.addi %[[PLACE]],
// CHECK:           vector.load %[[VAL]][%[[NEXT]]]
// CHECK:           vector.load %[[X]][%{{.*}}] : memref<?x64xbf16>, vector<2xbf16>
// CHECK:           x86.avx512.dot %[[S0]], %[[W0]],
// CHECK-NEXT:      x86.avx512.dot %[[S1]],
// CHECK-COUNT-30:  x86.avx512.dot
// CHECK-NOT:       x86.avx512.dot
// CHECK-LABEL: func.func private @region_tile4(
// CHECK-LABEL: func.func private @region_tile2(
// CHECK-LABEL: func.func private @region_tile1(
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "vnnimap(reduction=1, rows=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "expand", tile = [96, 96]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "vnnimap(reduction=1, rows=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
